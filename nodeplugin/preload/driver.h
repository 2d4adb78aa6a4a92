/* The driver API as all versions of programs know it. */
#ifndef QUOTIENT_DRIVER_H
#define QUOTIENT_DRIVER_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define RESULT CUresult
#include "loading.h"

#endif
