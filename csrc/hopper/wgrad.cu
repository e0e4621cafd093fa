#include "csrc/hopper/wgrad.h"

#include <algorithm>
#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/group_layout.cuh"
#include "csrc/hopper/instructions.cuh"
#include "csrc/hopper/tensor_map.h"
#include "csrc/hopper/wgrad_kernel.cuh"

namespace jax_grouped {
namespace hopper {
namespace {

constexpr int kSetupThreads = 512;

struct SetupArguments {
  CUtensorMap maps[2];  // with the sizes of no group yet
  const uint8_t* data[2];
  int32_t features[2];
  UnitCounts element_units;
  GroupTable table;
  GroupMaps group_maps;
};

// A block per batch element finds its groups and describes their operands.
__global__ void __launch_bounds__(kSetupThreads) SetUpWgrad(Groups batch, const __grid_constant__ SetupArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kMapsAtOnce = 256;
  __shared__ alignas(128) CUtensorMap maps[kMapsAtOnce];
  const auto element = static_cast<int32_t>(blockIdx.x);
  const GroupTable table = args.table.At(element);
  FillGroupTable<kSetupThreads>(batch, element, args.element_units, table);
  if (threadIdx.x >= kMapsAtOnce) return;
  CUtensorMap& map = maps[threadIdx.x];
  const int operand = threadIdx.x % 2;
  map = args.maps[operand];
  for (int32_t group = threadIdx.x / 2; group < batch.num_groups; group += kMapsAtOnce / 2) {
    const int32_t unit = table.UnitsBefore(Unit::k16)[group];
    const int32_t units = table.UnitsBefore(Unit::k16)[group + 1] - unit;
    // Nothing is read of an empty group, but a map of no columns would not be valid.
    const uint32_t tokens = max(units, 1) * kFp8Alignment;
    const int64_t first = static_cast<int64_t>(args.features[operand]) * unit * kFp8Alignment;
    ReplaceMatrix(&map, args.data[operand] + first, tokens, tokens);
    const int32_t index = element * batch.num_groups + group;
    *(operand == 0 ? args.group_maps.X(index) : args.group_maps.Dy(index)) = map;
  }
  ReleaseTensorMaps();
#endif
}

CUtensorMapDataType MapType(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case CUDA_R_16F:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

// The features of an operand, without the tokens of any group yet.
BoxedTensor OperandBoxes(const void* data, int64_t features, uint32_t rows) {
  return {data,
          CU_TENSOR_MAP_DATA_TYPE_UINT8,
          {kFp8Alignment, static_cast<cuuint64_t>(features)},
          {kFp8Alignment},
          {kStageTokens, rows}};
}

BoxedTensor DkernelBoxes(const Wgrad& wgrad, int32_t groups) {
  const bool wide = wgrad.dkernel_type == CUDA_R_32F;
  const auto in_features = static_cast<cuuint64_t>(wgrad.in_features);
  const auto out_features = static_cast<cuuint64_t>(wgrad.out_features);
  const cuuint64_t row_bytes = out_features * (wide ? 4 : 2);
  return {wgrad.dkernel,
          MapType(wgrad.dkernel_type),
          {out_features, in_features, static_cast<cuuint64_t>(groups)},
          {row_bytes, row_bytes * in_features},
          {kBoxRowBytes / (wide ? 4u : 2u), Fragment::kRows, 1}};
}

template <typename XType, typename DyType, ScalingMode kMode>
Status LaunchProduct(cudaStream_t stream, int device, const Arguments& args) {
  const auto kernel = &GroupedWgrad<XType, DyType, kMode>;
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  JAX_GROUPED_RETURN_IF_FAILED(
      Status::FromCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
                       "Asking for shared memory"));
  const int64_t tiles = static_cast<int64_t>(args.all_groups) * CeilDiv(args.in_features, kTileRows) *
                        CeilDiv(args.out_features, kCluster * kTileColumns);
  const auto clusters = static_cast<uint32_t>(std::min<int64_t>(tiles, properties.processors / kCluster));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return Status::FromCuda(cudaLaunchKernelEx(&config, kernel, args), "Launching a weight gradient");
}

template <typename XType, typename DyType>
Status LaunchMode(cudaStream_t stream, int device, ScalingMode mode, const Arguments& args) {
  return mode == ScalingMode::kTensor ? LaunchProduct<XType, DyType, ScalingMode::kTensor>(stream, device, args)
                                      : LaunchProduct<XType, DyType, ScalingMode::kBlock1D>(stream, device, args);
}

int64_t MapBytes(int64_t batch, int64_t num_groups) {
  return 2 * batch * num_groups * static_cast<int64_t>(sizeof(CUtensorMap));
}

}  // namespace

int64_t WgradScratchBytes(int64_t batch, int64_t num_groups) {
  return MapBytes(batch, num_groups) + batch * GroupTable::Size(num_groups) * static_cast<int64_t>(sizeof(int32_t));
}

Status LaunchWgrad(cudaStream_t stream, int device, const Wgrad& wgrad, const Groups& groups, void* scratch) {
  const GroupMaps maps{static_cast<CUtensorMap*>(scratch)};
  const GroupTable table{
      reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + MapBytes(groups.batch, groups.num_groups)),
      groups.num_groups};
  SetupArguments setup{{},
                       {static_cast<const uint8_t*>(wgrad.x), static_cast<const uint8_t*>(wgrad.dy)},
                       {static_cast<int32_t>(wgrad.in_features), static_cast<int32_t>(wgrad.out_features)},
                       wgrad.element_units,
                       table,
                       maps};
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(OperandBoxes(wgrad.x, wgrad.in_features, kTileRows / kCluster), &setup.maps[0]));
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(OperandBoxes(wgrad.dy, wgrad.out_features, kTileColumns), &setup.maps[1]));
  SetUpWgrad<<<groups.batch, kSetupThreads, 0, stream>>>(groups, setup);
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaGetLastError(), "Launching the setup of a weight gradient"));

  Arguments args{{},
                 maps,
                 table,
                 groups.AllGroups(),
                 wgrad.x_scale,
                 wgrad.dy_scale,
                 static_cast<int32_t>(wgrad.in_features),
                 static_cast<int32_t>(wgrad.out_features),
                 wgrad.dkernel_type,
                 wgrad.accumulate};
  JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(DkernelBoxes(wgrad, groups.AllGroups()), &args.dkernel));
  if (wgrad.x_type == CUDA_R_8F_E5M2) return LaunchMode<E5m2, E4m3>(stream, device, wgrad.mode, args);
  if (wgrad.dy_type == CUDA_R_8F_E5M2) return LaunchMode<E4m3, E5m2>(stream, device, wgrad.mode, args);
  return LaunchMode<E4m3, E4m3>(stream, device, wgrad.mode, args);
}

}  // namespace hopper
}  // namespace jax_grouped
