# The CUDA backend: libpowerinfer_cuda.so beside libpowerinfer.so, which opens it at run time. It exports
# te_cuda_table and pi_device_cuda (its tables), carries the CUDA runtime in itself and needs the driver only when it runs.
#
#   -DPOWERINFER_CUDA=ON
#   -DPOWERINFER_CUDA_ARCHITECTURES="90"      default: 75-real ... 100-real, and 120 with PTX; or "native"
#   -DPOWERINFER_CUDA_UNITY=ON               for checks on few cores: files that differ in their group of formats alone
#                                            are compiled together (by CMake 3.31 and newer)
option(POWERINFER_CUDA_UNITY "Compile CUDA files of several formats together" OFF)
set(POWERINFER_CUDA_ARCHITECTURES "" CACHE STRING "GPU architectures of the CUDA backend; empty: all")
include(cmake/cuda_architectures.cmake)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "${cuda_architectures}")
endif()
enable_language(CUDA)
# Of compute capability 9.0 all instructions are used, wgmma, too (wide_multiply.cuh).
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native" AND CMAKE_CUDA_ARCHITECTURES_NATIVE)
    set(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES_NATIVE}")
endif()
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90-real$" "90a-real")
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90$" "90a-real;90-virtual")
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

file(GLOB cuda_sources CONFIGURE_DEPENDS vendor/cuda/*.cu native/device/cuda/*.cu)
# What it shares with the engine is compiled in again: the two libraries see nothing of each other.
add_library(powerinfer_cuda SHARED ${cuda_sources} vendor/core/te_status.c vendor/core/te_types.c vendor/core/te_layout.c
    vendor/core/te_os_linux.c vendor/core/te_os_limits.c vendor/core/te_os_machine.c vendor/core/te_pool.c vendor/core/te_team_size.c
    native/device/space.c)
set(cuda_exports "${PROJECT_BINARY_DIR}/exports_cuda.map")
file(CONFIGURE OUTPUT "${cuda_exports}" CONTENT "{ global: te_cuda_table; pi_device_cuda; local: *; };\n" @ONLY)
target_include_directories(powerinfer_cuda PRIVATE vendor)
if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
    target_compile_definitions(powerinfer_cuda PRIVATE TE_CUDA_WGMMA)
endif()
target_compile_options(powerinfer_cuda PRIVATE
    # C++ is used as a language only; nothing of its library is linked.
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics>
    $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Wshadow>)
if(POWERINFER_WERROR)
    target_compile_options(powerinfer_cuda PRIVATE
        $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings> $<$<COMPILE_LANGUAGE:C>:-Werror>)
endif()
target_link_options(powerinfer_cuda PRIVATE "LINKER:--version-script=${cuda_exports}" LINKER:--no-undefined -static-libgcc)
target_link_libraries(powerinfer_cuda PRIVATE CUDA::cudart_static Threads::Threads ${CMAKE_DL_LIBS} rt m)
set_target_properties(powerinfer_cuda PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CUDA_RUNTIME_LIBRARY Static
    CUDA_SEPARABLE_COMPILATION OFF LINKER_LANGUAGE C LINK_DEPENDS "${cuda_exports}")
# Most of the time goes into headers. Only the ordinary build sees that each of these files includes what it needs.
if(POWERINFER_CUDA_UNITY)
    foreach(source IN LISTS cuda_sources)
        if(source MATCHES "/([a-z_]+)_(32|bits|float|k|k23|table|file)\\.cu$")
            set_property(SOURCE "${source}" PROPERTY UNITY_GROUP "${CMAKE_MATCH_1}")
        endif()
    endforeach()
    set_target_properties(powerinfer_cuda PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endif()
install(TARGETS powerinfer_cuda LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")

if(POWERINFER_TESTING)
    foreach(source kernels_check.cpp kernels_bench.cu prefill_check.cpp prefill_bench.cu)
        get_filename_component(name "${source}" NAME_WE)
        add_executable(gpu_${name} "tests/gpu/${source}")
        target_include_directories(gpu_${name} PRIVATE vendor tests/gpu)
        target_link_libraries(gpu_${name} PRIVATE powerinfer_cuda te_testing m stdc++)
        if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
            target_compile_definitions(gpu_${name} PRIVATE TE_CUDA_WGMMA)
        endif()
        set_target_properties(gpu_${name} PROPERTIES CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}"
            CUDA_RUNTIME_LIBRARY Static)
    endforeach()
endif()
