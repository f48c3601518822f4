// Brings together the messages that have arrived and the ops that wait for them, in whichever order they come.

#ifndef DAPPLE_TF_NATIVE_MAILBOX_H_
#define DAPPLE_TF_NATIVE_MAILBOX_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "message.h"
#include "tensorflow/core/framework/tensor.h"

namespace dapple {

// Bytes of messages in flight in this process: queued for sending, or received and not yet taken by an op.
class InFlight {
 public:
  void Add(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }

  // Returns the largest number since the last call.
  int64_t TakePeak() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(peak_, now_);
  }

 private:
  std::mutex mutex_;
  int64_t now_ = 0;
  int64_t peak_ = 0;
};

// Notes when the step of a waiting op was cancelled. Outlives the op.
class Cancellation {
 public:
  void Note() { since_ = Clock::now().time_since_epoch().count(); }

  // Returns whether the step was cancelled more than `seconds` ago.
  bool OlderThan(double seconds) const {
    const Clock::duration since(since_);
    const std::chrono::duration<double> age = Clock::now().time_since_epoch() - since;
    return since.count() != 0 && age.count() > seconds;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::atomic<Clock::rep> since_{0};  // 0: it was not
};

class Mailbox {
 public:
  // Gets the tensors of a message, or the reason why it will not come. Called once, without locks held.
  using Receiver = std::function<void(const absl::Status&, std::vector<tensorflow::Tensor>)>;

  explicit Mailbox(InFlight* in_flight) : in_flight_(in_flight) {}

  // Calls `receiver` as soon as the message is there: at once, or later by the thread that delivers it.
  void Await(int source, const Tag& tag, std::shared_ptr<const Cancellation> cancellation, Receiver receiver) {
    absl::Status status;
    std::vector<tensorflow::Tensor> tensors;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Key key = MakeKey(source, tag);
      if (auto found = arrived_.find(key); found != arrived_.end()) {
        tensors = std::move(found->second.tensors);
        in_flight_->Add(-BytesOf(tensors));
        arrived_.erase(found);
      } else if (auto failed = failed_.find(source); failed != failed_.end()) {
        status = Explain(failed->second, tag);
      } else {
        waiting_[key] = {std::move(receiver), std::move(cancellation), Clock::now()};
        return;
      }
    }
    receiver(status, std::move(tensors));
  }

  // Takes a message whose bytes are complete, and which counts as in flight.
  void Deliver(int source, Message message) {
    Receiver receiver;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Key key = MakeKey(source, message.tag);
      auto found = waiting_.find(key);
      if (found == waiting_.end()) {
        arrived_[key] = std::move(message);
        return;
      }
      receiver = std::move(found->second.receiver);
      waiting_.erase(found);
    }
    in_flight_->Add(-message.Bytes());
    receiver(absl::OkStatus(), std::move(message.tensors));
  }

  // Ends all waits of this moment with `status`.
  void Abort(const absl::Status& status) {
    std::map<Key, Waiting> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting.swap(waiting_);
    }
    for (auto& [key, one] : waiting) one.receiver(status, {});
  }

  // Ends all waits for messages of `source`, now and later, except for what has arrived already.
  void Fail(int source, const absl::Status& status) {
    std::vector<std::pair<Tag, Receiver>> receivers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failed_.emplace(source, status);
      for (auto it = waiting_.begin(); it != waiting_.end();) {
        if (std::get<0>(it->first) == source) {
          receivers.emplace_back(Tag{std::get<1>(it->first), std::get<2>(it->first)}, std::move(it->second.receiver));
          it = waiting_.erase(it);
        } else {
          ++it;
        }
      }
    }
    for (auto& [tag, receiver] : receivers) receiver(Explain(status, tag), {});
  }

  // Returns a line `rank exchange` for each message that an op has waited for longer than `seconds`.
  std::string DescribeWaits(double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string lines;
    for (const auto& [key, waiting] : waiting_) {
      if (std::chrono::duration<double>(Clock::now() - waiting.since).count() > seconds) {
        absl::StrAppend(&lines, std::get<0>(key), " ", std::get<1>(key), "\n");
      }
    }
    return lines;
  }

  // Returns whether an op waits whose step was cancelled more than `seconds` ago.
  bool HasCancelledWaits(double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(waiting_.begin(), waiting_.end(), [seconds](const auto& entry) {
      return entry.second.cancellation->OlderThan(seconds);
    });
  }

 private:
  using Key = std::tuple<int, std::string, int64_t>;
  using Clock = std::chrono::steady_clock;

  struct Waiting {
    Receiver receiver;
    std::shared_ptr<const Cancellation> cancellation;
    Clock::time_point since;
  };

  static Key MakeKey(int source, const Tag& tag) { return {source, tag.exchange, tag.step}; }

  static int64_t BytesOf(const std::vector<tensorflow::Tensor>& tensors) {
    int64_t bytes = 0;
    for (const auto& tensor : tensors) bytes += tensor.TotalBytes();
    return bytes;
  }

  static absl::Status Explain(const absl::Status& status, const Tag& tag) {
    return absl::Status(status.code(), absl::StrCat(status.message(), " (waiting for ", tag.Describe(), ")"));
  }

  InFlight* const in_flight_;
  std::mutex mutex_;
  std::map<Key, Message> arrived_;
  std::map<Key, Waiting> waiting_;
  std::map<int, absl::Status> failed_;
};

}  // namespace dapple

#endif  // DAPPLE_TF_NATIVE_MAILBOX_H_
