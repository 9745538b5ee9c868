#include "runtime/src/vision_queue.h"

#include <algorithm>
#include <utility>

#include "runtime/src/clock.h"

namespace deltaflash {

void VisionQueue::enqueue(const std::shared_ptr<Sequence>& sequence) {
  if (!sequence->request.images.empty()) {
    waiting_.push_back(sequence);
  }
}

void VisionQueue::remove(const Sequence& sequence) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const auto& waiting) { return waiting.get() == &sequence; });
  if (found == waiting_.end()) {
    return;
  }
  if (found == waiting_.begin()) {
    encoder_.abandon();
  }
  waiting_.erase(found);
}

std::shared_ptr<Sequence> VisionQueue::advance(std::int64_t budget_ns) {
  const std::int64_t end = now_ns() + budget_ns;
  std::shared_ptr<Sequence> sequence;
  for (std::int64_t left = budget_ns; left > 0 && !waiting_.empty(); left = end - now_ns()) {
    sequence = waiting_.front();
    if (sequence->stats.vision_start_ns == 0) {
      sequence->stats.vision_start_ns = now_ns();
    }
    const Image& image = sequence->request.images[sequence->embeddings.size()];
    if (!encoder_.busy()) {
      if (auto cached = cache_.find(image)) {
        take(*sequence, std::move(cached));
        continue;
      }
      encoder_.begin(image);
    }
    if (auto done = encoder_.advance(left)) {
      cache_.add(image, done);
      take(*sequence, std::move(done));
    } else {
      break;  // the slice is used up
    }
  }
  return sequence;
}

void VisionQueue::take(Sequence& sequence, std::shared_ptr<const ImageEmbeddings> embeddings) {
  auto& images = sequence.request.images;
  images[sequence.embeddings.size()].pixels.reset();
  sequence.embeddings.push_back(std::move(embeddings));
  if (sequence.embeddings.size() == images.size()) {
    sequence.stats.vision_end_ns = now_ns();
    waiting_.pop_front();
  }
}

double VisionQueue::fraction(const Sequence& sequence) const {
  const auto& images = sequence.request.images;
  double done = 0;
  double all = 0;
  for (std::size_t i = 0; i < images.size(); ++i) {
    const auto area = static_cast<double>(images[i].height * images[i].width);
    all += area;
    if (i < sequence.embeddings.size()) {
      done += area;
    } else if (i == sequence.embeddings.size() && encoder_.busy() &&
               waiting_.front().get() == &sequence) {
      done += area * encoder_.fraction();
    }
  }
  return all > 0 ? done / all : 1;
}

}  // namespace deltaflash
