#include "plugins/common/thread_pool.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {

void bind_thread_pool(nb::module_& plugins) {
  nb::class_<ThreadPool>(plugins, "ThreadPool",
                         "The threads an op runs on. One op at a time may use a pool.")
      .def(
          "__init__",
          [](ThreadPool* self, int num_threads) {
            check_argument(num_threads >= 1, "ThreadPool",
                           "expected num_threads >= 1, found " + std::to_string(num_threads));
            new (self) ThreadPool(num_threads);
          },
          nb::arg("num_threads"), "`num_threads` counts the calling thread too.")
      .def_prop_ro("num_threads", &ThreadPool::num_threads);
}

}  // namespace deltaflash
