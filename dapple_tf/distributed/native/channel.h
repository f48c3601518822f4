// The connection to one peer: a queue of messages to send, and the message that is being received.
//
// The socket never blocks. Tensors are sent from, and received into, their own memory, in pieces of at most
// kPieceBytes, so that connections take turns. Where the peer can read this process's memory, it is told where large
// tensors are, and copies them itself: the sender then computes while they are copied.

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
#include "incoming.h"
#include "mailbox.h"
#include "message.h"
#include "peer_memory.h"

namespace dapple {

constexpr size_t kPieceBytes = 1 << 20;
constexpr int64_t kReferenceBytes = 1 << 16;  // smaller messages are sent by value

class Channel {
 public:
  // Takes over the socket `fd`, which `epoll` will watch for as long as it is open.
  Channel(int peer, int fd, int epoll, Mailbox* mailbox, InFlight* in_flight)
      : peer_(peer),
        fd_(fd),
        epoll_(epoll),
        process_(FindPeerProcess(fd)),
        mailbox_(mailbox),
        in_flight_(in_flight),
        incoming_(in_flight) {}

  void Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    Watch(EPOLL_CTL_ADD, EPOLLIN);
    if (process_ == 0) return;
    std::string header;
    AppendNumber(&header, probe_.address());
    AppendNumber(&header, probe_.number());
    Enqueue({AddPrefix(Kind::kProbe, header), {}});
  }

  // Closes the socket in a forked child.
  void CloseInChild() {
    if (fd_ >= 0) close(fd_);
  }

  // Queues a message and sends what the system takes at once; the thread of the network sends the rest.
  absl::Status Send(Message message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_.ok()) return closed_;
    const int64_t bytes = message.Bytes();
    in_flight_->Add(bytes);
    if (readable_ && bytes >= kReferenceBytes) {
      Enqueue({EncodeHeader(Kind::kReferences, message), {}});
      referenced_.push_back(std::move(message));
    } else {
      std::string header = EncodeHeader(Kind::kTensors, message);
      Enqueue({std::move(header), std::move(message)});
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

  // Whether bytes of the peer's memory are to be copied, of which epoll knows nothing.
  bool copies() const { return incoming_.copies(); }

  // Receives, or copies, at most kPieceBytes; only the thread of the network may call this.
  void ReceivePiece() {
    size_t budget = kPieceBytes;
    while (budget > 0) {
      const Incoming::Piece piece = incoming_.Next();
      const size_t size = std::min(piece.size, budget);
      const ssize_t received = piece.address != 0 ? ReadMemory(process_, piece.address, piece.target, size)
                                                : recv(fd_, piece.target, size, MSG_DONTWAIT);
      if (received < 0 && errno == EINTR) continue;
      if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      // ECONNRESET: it was closed with unread bytes.
      if (received == 0 || (received < 0 && errno == ECONNRESET)) return Close("the other end has closed it");
      if (received < 0) {
        const char* what = piece.address != 0 ? "cannot copy a tensor from its memory: " : "";
        return Close(absl::StrCat(what, std::strerror(errno)));
      }
      budget -= received;
      Incoming::State state = incoming_.Advance(received);
      if (state == Incoming::State::kComplete && !TakeMessage()) state = Incoming::State::kDamaged;
      if (state == Incoming::State::kDamaged) return Close("it has sent a damaged message");
    }
  }

 private:
  struct Outgoing {
    std::string header;
    Message message;  // empty if its tensors are not sent by value
    size_t sent = 0;  // bytes, of header and tensors together
  };

  void Watch(int operation, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.ptr = this;
    epoll_ctl(epoll_, operation, fd_, &event);
  }

  // Enqueue, SendPiece and UnsentParts are called with the lock held.
  void Enqueue(Outgoing outgoing) {
    queue_.push_back(std::move(outgoing));
    if (queue_.size() == 1) {
      SendPiece();
      if (!queue_.empty()) Watch(EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    }
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

  // Does what the complete message says; returns false if that is not possible.
  bool TakeMessage() {
    const Kind kind = incoming_.kind();
    Message message = incoming_.Take();
    switch (kind) {
      case Kind::kReferences:
        Reply(Kind::kCopied);
        [[fallthrough]];
      case Kind::kTensors:
        mailbox_->Deliver(peer_, std::move(message));
        return true;
      case Kind::kCopied:
        return Release();
      case Kind::kProbe: {
        HeaderReader reader(incoming_.header());
        const auto address = reader.ReadNumber<uint64_t>();
        const auto number = reader.ReadNumber<uint64_t>();
        if (reader.at_end() && CanReadMemory(process_, address, number)) Reply(Kind::kReadable);
        return reader.at_end();
      }
      case Kind::kReadable: {
        std::lock_guard<std::mutex> lock(mutex_);
        readable_ = process_ != 0;
        return readable_;
      }
    }
    return false;
  }

  void Reply(Kind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    Enqueue({AddPrefix(kind, ""), {}});
  }

  // Frees the tensors of the oldest message that was sent by reference; returns false if there is none.
  bool Release() {
    Message copied;  // freed once the lock is
    std::lock_guard<std::mutex> lock(mutex_);
    if (referenced_.empty()) return false;
    copied = std::move(referenced_.front());
    referenced_.pop_front();
    in_flight_->Add(-copied.Bytes());
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
      for (const auto& message : referenced_) in_flight_->Add(-message.Bytes());
      referenced_.clear();
      incoming_.Drop();
      epoll_ctl(epoll_, EPOLL_CTL_DEL, fd_, nullptr);
      close(fd_.exchange(-1));
    }
    mailbox_->Fail(peer_, status);
  }

  const int peer_;
  std::atomic<int> fd_;  // -1 once it is closed
  const int epoll_;
  const pid_t process_;  // of the peer, or 0 if unknown; the probe tells whether its memory can be read
  const Probe probe_;
  Mailbox* const mailbox_;
  InFlight* const in_flight_;

  std::mutex mutex_;  // of what sends, and of closing
  absl::Status closed_;
  std::deque<Outgoing> queue_;
  bool readable_ = false;           // the peer can read this process's memory
  std::deque<Message> referenced_;  // messages that the peer copies from it

  Incoming incoming_;  // only the thread of the network uses it
};

}  // namespace dapple

#endif  // DAPPLE_TF_NATIVE_CHANNEL_H_
