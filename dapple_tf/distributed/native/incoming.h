// The message that is being received from a peer, byte by byte as they come.

#ifndef DAPPLE_TF_NATIVE_INCOMING_H_
#define DAPPLE_TF_NATIVE_INCOMING_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "mailbox.h"
#include "message.h"
#include "tensorflow/core/framework/allocator.h"

namespace dapple {

class Incoming {
 public:
  explicit Incoming(InFlight* in_flight) : in_flight_(in_flight) {}

  // The next `size` bytes: where they go, and their address in the sender's memory, or 0 if they come by the socket.
  struct Piece {
    char* target;
    size_t size;
    uint64_t address;
  };

  Piece Next() {
    switch (part_) {
      case Part::kPrefix:
        return {prefix_bytes_ + filled_, kPrefixBytes - filled_, 0};
      case Part::kHeader:
        return {header_.data() + filled_, header_.size() - filled_, 0};
      default:
        const auto data = message_.tensors[tensor_].tensor_data();
        const uint64_t address = addresses_.empty() ? 0 : addresses_[tensor_] + filled_;
        return {const_cast<char*>(data.data()) + filled_, data.size() - filled_, address};
    }
  }

  enum class State { kMissing, kComplete, kDamaged };

  // Notes that the next `bytes` bytes of the piece have arrived; returns the state of the message.
  State Advance(size_t bytes) {
    filled_ += bytes;
    if (bytes < 1 || Next().size > 0) return State::kMissing;
    filled_ = 0;
    switch (part_) {
      case Part::kPrefix: {
        const auto prefix = DecodePrefix(prefix_bytes_);
        if (!prefix) return State::kDamaged;
        kind_ = prefix->kind;
        header_.resize(prefix->header_bytes);
        part_ = Part::kHeader;
        return header_.empty() ? FinishHeader() : State::kMissing;
      }
      case Part::kHeader:
        return FinishHeader();
      default:
        ++tensor_;
        return FindTensor();
    }
  }

  // Whether bytes are to be copied from the sender's memory next.
  bool copies() const { return part_ == Part::kTensors && !addresses_.empty(); }

  // Kind and header of the complete message. Take returns its tensors, and makes ready for the next message.
  Kind kind() const { return kind_; }
  const std::string& header() const { return header_; }
  Message Take() {
    part_ = Part::kPrefix;
    return std::exchange(message_, {});
  }

  // Discards an incomplete message.
  void Drop() {
    if (part_ == Part::kTensors) in_flight_->Add(-message_.Bytes());
    Take();
  }

 private:
  enum class Part { kPrefix, kHeader, kTensors };

  State FinishHeader() {
    if (kind_ != Kind::kTensors && kind_ != Kind::kReferences) return State::kComplete;
    if (!DecodeHeader(kind_, header_, tensorflow::cpu_allocator(), &message_, &addresses_)) return State::kDamaged;
    in_flight_->Add(message_.Bytes());
    part_ = Part::kTensors;
    tensor_ = 0;
    return FindTensor();
  }

  // Goes on to the next tensor that has bytes.
  State FindTensor() {
    while (tensor_ < message_.tensors.size() && message_.tensors[tensor_].TotalBytes() == 0) ++tensor_;
    return tensor_ == message_.tensors.size() ? State::kComplete : State::kMissing;
  }

  InFlight* const in_flight_;
  Part part_ = Part::kPrefix;
  char prefix_bytes_[kPrefixBytes];
  Kind kind_ = Kind::kTensors;
  std::string header_;
  Message message_;
  std::vector<uint64_t> addresses_;  // of the tensors, where they were sent by reference
  size_t tensor_ = 0;
  size_t filled_ = 0;  // bytes of the piece
};

}  // namespace dapple

#endif  // DAPPLE_TF_NATIVE_INCOMING_H_
