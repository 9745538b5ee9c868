#include "runtime/src/detokenizer.h"

namespace deltaflash {

void Detokenizer::append(std::int32_t id, std::string& out) {
  if (skip_special_tokens_ && vocabulary_->is_special(id)) {
    return;
  }
  decoder_.append(vocabulary_->bytes(id), out);
}

}  // namespace deltaflash
