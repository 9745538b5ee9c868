#include "plugins/common/instruction_set.h"

#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {

void bind_instruction_set(nb::module_& plugins) {
  nb::enum_<InstructionSet>(plugins, "InstructionSet", nb::is_arithmetic(),
                            "What the CPU ops use, from narrow to wide vectors.")
      .value("BASE", InstructionSet::kBase)
      .value("AVX2", InstructionSet::kAvx2)
      .value("AVX512", InstructionSet::kAvx512);
  plugins.def("widest_instruction_set", &widest_instruction_set,
              "The widest that this machine and this build have.");
  plugins.def("instruction_set", &instruction_set,
              "The one that ops use: the widest, unless it was set.");
  plugins.def("set_instruction_set", &set_instruction_set, nb::arg("instruction_set"),
              R"(Makes ops use another one, for tests and measurements; not while an op runs.

Args:
  instruction_set: the one to use.

Raises:
  ValueError: this machine or this build does not have it.)");
}

}  // namespace deltaflash
