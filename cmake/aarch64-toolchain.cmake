# Linux on 64-bit ARM, cross-compiled with Debian's packages gcc-aarch64-linux-gnu and g++-aarch64-linux-gnu:
#
#   cmake -S . -B build/aarch64 -G Ninja --toolchain cmake/aarch64-toolchain.cmake
#
# `make cross-aarch64` builds and tests this way, its programs run by qemu.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
