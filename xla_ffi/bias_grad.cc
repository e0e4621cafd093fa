#include "csrc/bias_grad/bias_grad.h"

#include <cstdint>

#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

ffi::Error BiasGrad(Call& call, const ffi::Dictionary&) {
  const Array dy = call.Operand("dy");
  const Array sizes = call.Operand("group_sizes");
  const Array offset = call.Operand("group_offset");
  const Array dbias = call.Result("dbias");
  const Array partial_sums = call.Result("partial_sums");
  const Array tables = call.Result("tables");
  const int64_t features = dy.Axis(1);
  const cudaDataType_t type = call.TakeFloatType(dy);
  call.CheckRank(dy, 2);
  call.CheckArray(dbias, ffi::F32, {dbias.Axis(0), features});
  call.Check(features > 0, "dy must have features");
  const Groups groups = call.TakeGroups(sizes, offset, dbias.Axis(0), dy.Axis(0));
  call.CheckRoom(partial_sums, ffi::F32, groups.batch * BiasGradTiles(groups.capacity, groups.num_groups) * features);
  call.CheckRoom(tables, ffi::S32, groups.batch * GroupTable::Size(groups.num_groups));
  call.CheckAligned({dy});
  if (!call.Finish()) return call.Error();
  return call.ToError(LaunchBiasGrad(call.stream, groups, dy.Data(), type, features, partial_sums.Data<float>(),
                                     tables.Data<int32_t>(), dbias.Data<float>()));
}

}  // namespace

JAX_GROUPED_DEFINE_EXECUTE(BiasGradExecute, "jax_grouped_bias_grad", BiasGrad, ffi::Dictionary);

}  // namespace jax_grouped
