#include <nanobind/nanobind.h>

#include "plugins/common/error.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {

namespace {

template <typename Error>
void bind_error(nb::module_& module, const char* name, const char* doc) {
  nb::exception<Error> type(module, name, PyExc_RuntimeError);
  type.attr("__doc__") = doc;
}

}  // namespace

void bind_errors(nb::module_& module) {
  bind_error<CapacityError>(module, "CapacityError", "No page, slot or queue place is left.");
  bind_error<EngineError>(module, "EngineError",
                          "Engine directory, plugin or manifest disagree; nothing can start.");
  bind_error<CudaError>(module, "CudaError", "A device call failed.");
  bind_error<EngineLost>(module, "EngineLost",
                         "The engine thread has ended; every request it held is failed.");
}

}  // namespace deltaflash
