# Sets cuda_architectures: those that this nvcc compiles for, of what is wanted; ends with an error where it is too old. The
# compiler is asked before CMake tries it: what CMake says of one that does not know an architecture helps nobody.
#
#   cmake -DCMAKE_CUDA_COMPILER=nvcc -P cmake/cuda_architectures.cmake      says what they are
set(oldest_cuda 12.0)
set(oldest_cuda_of_blackwell 12.8)
set(cuda_architectures "${POWERINFER_CUDA_ARCHITECTURES}")

find_program(POWERINFER_NVCC NAMES ${CMAKE_CUDA_COMPILER} $ENV{CUDACXX} nvcc PATHS /usr/local/cuda/bin)
mark_as_advanced(POWERINFER_NVCC)
if(NOT POWERINFER_NVCC)
    message(FATAL_ERROR "The CUDA backend needs nvcc, on PATH, named by CUDACXX or in /usr/local/cuda/bin")
endif()
execute_process(COMMAND "${POWERINFER_NVCC}" --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET)
if(NOT nvcc_says MATCHES "release ([0-9]+\\.[0-9]+)")
    message(FATAL_ERROR "${POWERINFER_NVCC} does not say its version")
endif()
set(cuda_version "${CMAKE_MATCH_1}")
if(cuda_version VERSION_LESS oldest_cuda)
    message(FATAL_ERROR "CUDA ${cuda_version} (${POWERINFER_NVCC}) is too old: ${oldest_cuda} or newer is needed, and "
        "${oldest_cuda_of_blackwell} for GPUs of compute capability 10.0 and 12.0. pip builds without it where "
        "POWERINFER_CUDA is 0")
endif()
if(cuda_architectures STREQUAL "")
    set(cuda_architectures "75-real;80-real;86-real;89-real;90-real;100-real;120")
    if(cuda_version VERSION_LESS oldest_cuda_of_blackwell)
        set(cuda_architectures "75-real;80-real;86-real;89-real;90")
    endif()
elseif(cuda_architectures MATCHES "1[0-9][0-9]" AND cuda_version VERSION_LESS oldest_cuda_of_blackwell)
    message(FATAL_ERROR "CUDA ${cuda_version} (${POWERINFER_NVCC}) is too old for ${cuda_architectures}: "
        "${oldest_cuda_of_blackwell} or newer is needed")
endif()
if(CMAKE_SCRIPT_MODE_FILE)
    message(STATUS "CUDA ${cuda_version}: ${cuda_architectures}")
endif()
