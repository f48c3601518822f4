// The connection to one peer: a queue of messages to send, and the message that is being received.
//
// The socket never blocks. Tensors are sent from, and received into, their own memory, in pieces of at most
// kPieceBytes, so that connections take turns.

#ifndef DAPPLE_TF_NATIVE_CHANNEL_H_
#define DAPPLE_TF_NATIVE_CHANNEL_H_

#include <errno.h>
#include <limits.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "mailbox.h"
#include "message.h"
#include "tensorflow/core/framework/allocator.h"

namespace dapple {

constexpr size_t kPieceBytes = 1 << 20;

class Channel {
 public:
  // Takes over the socket `fd`, which `epoll` will watch for as long as it is open.
  Channel(int peer, int fd, int epoll, Mailbox* mailbox, InFlight* in_flight)
      : peer_(peer), fd_(fd), epoll_(epoll), mailbox_(mailbox), in_flight_(in_flight) {}

  void Start() { Watch(EPOLL_CTL_ADD, EPOLLIN); }

  // Closes the socket in a forked child.
  void CloseInChild() {
    if (fd_ >= 0) close(fd_);
  }

  // Queues a message and sends what the system takes at once; the thread of the network sends the rest.
  absl::Status Send(Message message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_.ok()) return closed_;
    in_flight_->Add(message.Bytes());
    std::string header = EncodeHeader(message);
    queue_.push_back({std::move(header), std::move(message)});
    if (queue_.size() == 1) {
      SendPiece();
      if (!queue_.empty()) Watch(EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    }
    return absl::OkStatus();
  }

  // Handles what epoll reports; only the thread of the network may call this.
  void Handle(uint32_t events) {
    if (events & EPOLLOUT) {
      std::lock_guard<std::mutex> lock(mutex_);
      SendPiece();
      if (queue_.empty() && closed_.ok()) Watch(EPOLL_CTL_MOD, EPOLLIN);
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) ReceivePiece();
  }

 private:
  struct Outgoing {
    std::string header;
    Message message;
    size_t sent = 0;  // bytes, of header and tensors together
  };

  enum class Expected { kPrefix, kHeader, kTensors };

  void Watch(int operation, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.ptr = this;
    epoll_ctl(epoll_, operation, fd_, &event);
  }

  // Sends at most kPieceBytes of the queue, as far as the system takes them. An error shows when the socket is read.
  void SendPiece() {
    size_t budget = kPieceBytes;
    while (!queue_.empty() && budget > 0) {
      Outgoing& first = queue_.front();
      std::vector<iovec> parts = UnsentParts(first, budget);
      msghdr header{};
      header.msg_iov = parts.data();
      header.msg_iovlen = std::min<size_t>(parts.size(), IOV_MAX);
      const ssize_t sent = sendmsg(fd_, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK) shutdown(fd_, SHUT_RDWR);
        return;
      }
      first.sent += sent;
      budget -= std::min<size_t>(budget, sent);
      if (first.sent == first.header.size() + first.message.Bytes()) {
        in_flight_->Add(-first.message.Bytes());
        queue_.pop_front();
      }
    }
  }

  static std::vector<iovec> UnsentParts(const Outgoing& outgoing, size_t budget) {
    std::vector<iovec> parts;
    size_t skip = outgoing.sent;
    auto add = [&](const char* data, size_t size) {
      const size_t done = std::min(skip, size);
      skip -= done;
      const size_t length = std::min(size - done, budget);
      if (length > 0) parts.push_back({const_cast<char*>(data) + done, length});
      budget -= length;
    };
    add(outgoing.header.data(), outgoing.header.size());
    for (const auto& tensor : outgoing.message.tensors) {
      const auto data = tensor.tensor_data();
      add(data.data(), data.size());
    }
    return parts;
  }

  // Receives at most kPieceBytes.
  void ReceivePiece() {
    size_t budget = kPieceBytes;
    while (budget > 0) {
      const auto [data, size] = Target();
      const ssize_t received = recv(fd_, data, std::min(size, budget), MSG_DONTWAIT);
      if (received < 0 && errno == EINTR) continue;
      if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (received <= 0) return Close(received == 0 ? "the other end has closed it" : std::strerror(errno));
      filled_ += received;
      budget -= received;
      if (static_cast<size_t>(received) == size && !Advance()) return Close("it has sent a damaged message");
    }
  }

  // Returns where the next bytes go, and how many are missing there.
  std::pair<char*, size_t> Target() {
    switch (expected_) {
      case Expected::kPrefix:
        return {prefix_ + filled_, kPrefixBytes - filled_};
      case Expected::kHeader:
        return {header_.data() + filled_, header_.size() - filled_};
      default:
        const auto data = message_.tensors[tensor_].tensor_data();
        return {const_cast<char*>(data.data()) + filled_, data.size() - filled_};
    }
  }

  // Goes on to what follows the prefix, header or tensor that is complete; returns false if it is damaged.
  bool Advance() {
    filled_ = 0;
    switch (expected_) {
      case Expected::kPrefix:
        header_.resize(DecodePrefix(prefix_));
        expected_ = Expected::kHeader;
        return !header_.empty();
      case Expected::kHeader:
        if (!DecodeHeader(header_, tensorflow::cpu_allocator(), &message_)) return false;
        in_flight_->Add(message_.Bytes());
        expected_ = Expected::kTensors;
        tensor_ = 0;
        break;
      case Expected::kTensors:
        ++tensor_;
    }
    while (tensor_ < message_.tensors.size() && message_.tensors[tensor_].TotalBytes() == 0) ++tensor_;
    if (tensor_ == message_.tensors.size()) {
      expected_ = Expected::kPrefix;
      mailbox_->Deliver(peer_, std::exchange(message_, {}));
    }
    return true;
  }

  void Close(const std::string& reason) {
    const absl::Status status =
        absl::UnavailableError(absl::StrCat("lost the connection to rank ", peer_, ": ", reason));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!closed_.ok()) return;
      closed_ = status;
      for (const auto& outgoing : queue_) in_flight_->Add(-outgoing.message.Bytes());
      queue_.clear();
      if (expected_ == Expected::kTensors) in_flight_->Add(-message_.Bytes());
      message_ = {};
      epoll_ctl(epoll_, EPOLL_CTL_DEL, fd_, nullptr);
      close(fd_.exchange(-1));
    }
    mailbox_->Fail(peer_, status);
  }

  const int peer_;
  std::atomic<int> fd_;  // -1 once it is closed
  const int epoll_;
  Mailbox* const mailbox_;
  InFlight* const in_flight_;

  std::mutex mutex_;  // of what sends, and of closing
  absl::Status closed_;
  std::deque<Outgoing> queue_;

  // What is being received; only the thread of the network uses it.
  Expected expected_ = Expected::kPrefix;
  char prefix_[kPrefixBytes];
  std::string header_;
  Message message_;
  size_t tensor_ = 0;
  size_t filled_ = 0;
};

}  // namespace dapple

#endif  // DAPPLE_TF_NATIVE_CHANNEL_H_
