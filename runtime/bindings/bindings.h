#pragma once

#include <nanobind/nanobind.h>

namespace deltaflash {

// One function a source file of this folder; each adds its part to `runtime._native`. Ops live in
// the submodule `runtime._native.plugins`.
void bind_errors(nanobind::module_& module);
void bind_text(nanobind::module_& module);

}  // namespace deltaflash
