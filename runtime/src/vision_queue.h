#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "runtime/src/encoder_cache.h"
#include "runtime/src/sequence.h"
#include "runtime/src/vision_encoder.h"

namespace deltaflash {

/// The sequences whose pictures are not encoded yet, oldest first, and the encoder that works on
/// them picture by picture. The loop thread uses it.
class VisionQueue {
 public:
  /// `encoder` outlives the queue.
  VisionQueue(VisionEncoder& encoder, std::int64_t cache_bytes)
      : encoder_(encoder), cache_(cache_bytes) {}

  /// Takes a sequence that has been admitted. One without pictures is left alone.
  void enqueue(const std::shared_ptr<Sequence>& sequence);

  /// Drops a sequence that ended, if it is here.
  void remove(const Sequence& sequence);

  bool empty() const { return waiting_.empty(); }

  /// Encodes for about `budget_ns`. Returns the sequence that it worked on last.
  std::shared_ptr<Sequence> advance(std::int64_t budget_ns);

  /// How much of a sequence's pictures is encoded, 0 to 1, by area.
  double fraction(const Sequence& sequence) const;

  const EncoderCache& cache() const { return cache_; }

 private:
  void take(Sequence& sequence, std::shared_ptr<const ImageEmbeddings> embeddings);

  VisionEncoder& encoder_;
  EncoderCache cache_;
  std::deque<std::shared_ptr<Sequence>> waiting_;
};

}  // namespace deltaflash
