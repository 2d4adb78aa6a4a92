/* How much memory an array takes, by its shape and the format of its elements. */
#ifndef QUOTIENT_ARRAY_SIZES_H
#define QUOTIENT_ARRAY_SIZES_H

#include "driver.h"

/* What the driver rounds rows up to. */
#define PITCH 512

/* UINT64_MAX if no memory is that large. */
uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned levels);

#endif
