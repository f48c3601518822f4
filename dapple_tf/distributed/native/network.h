// The connections of this process to other ranks, and the thread that serves them all.

#ifndef DAPPLE_TF_NATIVE_NETWORK_H_
#define DAPPLE_TF_NATIVE_NETWORK_H_

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "channel.h"
#include "mailbox.h"
#include "message.h"

namespace dapple {

class Network {
 public:
  // Returns the network of this process. It is never destroyed: its thread runs until the process ends.
  static Network* Get() {
    static Network* network = new Network();
    return network;
  }

  // Takes over the connected socket `fd`. Returns false if there is a connection to `peer` already.
  bool Connect(int peer, int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& channel = channels_[peer];
    if (channel != nullptr) return false;
    channel = std::make_unique<Channel>(peer, fd, epoll_, &mailbox_, &in_flight_);
    channel->Start();
    if (!std::exchange(running_, true)) std::thread([this] { Run(); }).detach();
    return true;
  }

  // Sends the tensors of an exchange to `peer`; this execution's step follows that of the last one.
  absl::Status Send(int peer, const std::string& exchange, std::vector<tensorflow::Tensor> tensors) {
    Channel* channel;
    Tag tag;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = channels_.find(peer);
      if (found == channels_.end()) {
        return absl::FailedPreconditionError(absl::StrCat("there is no connection to rank ", peer));
      }
      channel = found->second.get();
      tag = {exchange, ++sent_[{peer, exchange}]};
    }
    return channel->Send({std::move(tag), std::move(tensors)});
  }

  // Returns the tag of the next message of an exchange that comes from `peer`.
  Tag NextTag(int peer, const std::string& exchange) {
    std::lock_guard<std::mutex> lock(mutex_);
    return {exchange, ++received_[{peer, exchange}]};
  }

  Mailbox* mailbox() { return &mailbox_; }
  InFlight* in_flight() { return &in_flight_; }

  // Closes the connections in a forked child, which has no thread to serve them and would keep them open when its
  // parent dies. It takes no lock: another thread may have held it at the fork.
  void CloseInChild() {
    for (const auto& [peer, channel] : channels_) channel->CloseInChild();
    close(epoll_);
  }

 private:
  Network() : epoll_(epoll_create1(EPOLL_CLOEXEC)), mailbox_(&in_flight_) {}

  void Run() {
    epoll_event events[64];
    std::set<Channel*> copying;
    for (;;) {
      const int count = epoll_wait(epoll_, events, 64, copying.empty() ? -1 : 0);
      if (count < 0 && errno != EINTR) return;
      for (int i = 0; i < count; ++i) {
        auto* channel = static_cast<Channel*>(events[i].data.ptr);
        channel->Handle(events[i].events);
        if (channel->copies()) copying.insert(channel);
      }
      for (auto it = copying.begin(); it != copying.end();) {
        (*it)->ReceivePiece();
        it = (*it)->copies() ? std::next(it) : copying.erase(it);
      }
    }
  }

  const int epoll_;
  InFlight in_flight_;
  Mailbox mailbox_;

  std::mutex mutex_;
  bool running_ = false;
  std::map<int, std::unique_ptr<Channel>> channels_;
  std::map<std::pair<int, std::string>, int64_t> sent_, received_;  // executions of an exchange with a peer
};

}  // namespace dapple

#endif  // DAPPLE_TF_NATIVE_NETWORK_H_
