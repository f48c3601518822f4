// Reads tensors from the memory of a process of the same host, so that they are copied once, and by the receiver alone.

#ifndef DAPPLE_TF_NATIVE_PEER_MEMORY_H_
#define DAPPLE_TF_NATIVE_PEER_MEMORY_H_

#include <errno.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <random>

namespace dapple {

// Returns the process at the other end of a Unix socket, or 0 where that is unknown: another host, or a container.
inline pid_t FindPeerProcess(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 || address.ss_family != AF_UNIX) return 0;
  ucred peer{};
  size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 ? peer.pid : 0;
}

// Copies up to `size` bytes from `address` of a process to `target`; returns how many, or -1 and errno.
inline ssize_t ReadMemory(pid_t process, uint64_t address, char* target, size_t size) {
  const iovec local{target, size};
  const iovec remote{reinterpret_cast<void*>(address), size};
  ssize_t copied;
  do {
    copied = process_vm_readv(process, &local, 1, &remote, 1, 0);
  } while (copied < 0 && errno == EINTR);
  return copied;
}

// A random number and where it is. A process that finds the number there can read this process's memory: the system may
// forbid it, or process numbers may have another meaning there.
class Probe {
 public:
  Probe() : number_(std::random_device()()) {}

  uint64_t address() const { return reinterpret_cast<uint64_t>(&number_); }
  uint64_t number() const { return number_; }

 private:
  const uint64_t number_;
};

inline bool CanReadMemory(pid_t process, uint64_t address, uint64_t number) {
  uint64_t found = 0;
  if (process == 0) return false;
  const ssize_t copied = ReadMemory(process, address, reinterpret_cast<char*>(&found), sizeof(found));
  return copied == sizeof(found) && found == number;
}

}  // namespace dapple

#endif  // DAPPLE_TF_NATIVE_PEER_MEMORY_H_
