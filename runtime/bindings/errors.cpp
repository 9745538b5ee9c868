#include <nanobind/nanobind.h>

#include <exception>
#include <string_view>

#include "plugins/common/error.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {

namespace {

template <typename Error>
void bind_error(nb::module_& module, const char* name, const char* doc) {
  const nb::exception<Error> type(module, name, PyExc_RuntimeError);
  nb::register_exception_translator(
      [](const std::exception_ptr& caught, void* python_type) {
        try {
          std::rethrow_exception(caught);
        } catch (const Error& error) {
          // Messages quote files, whose bytes may be anything.
          const std::string_view what = error.what();
          const nb::object message = nb::steal(PyUnicode_DecodeUTF8(
              what.data(), static_cast<Py_ssize_t>(what.size()), "backslashreplace"));
          PyErr_SetObject(static_cast<PyObject*>(python_type), message.ptr());
        }
      },
      type.ptr());
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
