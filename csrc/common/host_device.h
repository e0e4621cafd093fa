// Marks functions that both the host and the device call, in headers that a C++ compiler reads too.

#ifndef JAX_GROUPED_CSRC_COMMON_HOST_DEVICE_H_
#define JAX_GROUPED_CSRC_COMMON_HOST_DEVICE_H_

#ifdef __CUDACC__
#define JAX_GROUPED_HOST_DEVICE __host__ __device__
#else
#define JAX_GROUPED_HOST_DEVICE
#endif

#endif  // JAX_GROUPED_CSRC_COMMON_HOST_DEVICE_H_
