// The cost of a transfer over the boundary between two stages; `measure_loads` of transfer.py is the same in Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dapple {

// `LinkTables` of dapple_tf/simulator/transfer.py.
struct Links {
  int servers;
  const double *inside, *inside_latency;  // [servers] seconds per byte, seconds
  double interface_, interface_latency;
  const double *own, *own_latency;  // [servers, servers] of links between two servers; 0: they have none
  bool has_own;
};

class Transfer {
 public:
  explicit Transfer(const Links& links)
      : leaving(links.servers, 0), entering(links.servers, 0), links_(links),
        pair_(links.has_own ? links.servers * links.servers : 0, 0) {}

  // Measure a transfer from n to n_next replicas. Replica i holds the rows from `cut`[i] to `cut`[i + 1]. `sender`,
  // `receiver`: functions from a replica to its server.
  template <class Sender, class Receiver>
  void measure(int n, const Sender& sender, const int64_t* cut, int n_next, const Receiver& receiver,
               const int64_t* cut_next) {
    for (const int server : touched) leaving[server] = entering[server] = 0;
    touched.clear();
    // Only what is not 0: many servers have more pairs than a transfer uses.
    for (const int pair : pairs_) pair_[pair] = 0;
    pairs_.clear();
    const int servers = links_.servers;
    const int64_t whole = cut[n], whole_next = cut_next[n_next];
    const double total = static_cast<double>(whole) * static_cast<double>(whole_next);
    double slowest = 0, sent = 0, most_leaving = 0, most_entering = 0;
    latency = 0;
    received_.assign(n_next, 0);
    int i = 0, j = 0;
    while (i < n && j < n_next) {
      const int64_t left = std::max(cut[i] * whole_next, cut_next[j] * whole);
      const int64_t right = std::min(cut[i + 1] * whole_next, cut_next[j + 1] * whole);
      const double part = static_cast<double>(right - left) / total;
      const int a = sender(i), b = receiver(j);
      if (a == b) {
        sent += part, received_[j] += part;
        latency = std::max(latency, links_.inside_latency[a]);
        slowest = std::max(slowest, std::max(sent, received_[j]) * links_.inside[a]);
      } else if (links_.has_own && links_.own[a * servers + b] > 0) {
        const int pair = a * servers + b;
        double& moved = pair_[pair];
        moved += part, pairs_.push_back(pair);
        latency = std::max(latency, links_.own_latency[a * servers + b]);
        slowest = std::max(slowest, moved * links_.own[a * servers + b]);
      } else {
        leaving[a] += part, entering[b] += part;
        touched.push_back(a), touched.push_back(b);
        most_leaving = std::max(most_leaving, leaving[a]), most_entering = std::max(most_entering, entering[b]);
        latency = std::max(latency, links_.interface_latency);
      }
      const bool ends = right == cut[i + 1] * whole_next;
      if (right == cut_next[j + 1] * whole) ++j;
      if (ends) ++i, sent = 0;
    }
    per_byte = std::max(slowest, std::max(most_leaving, most_entering) * links_.interface_);
  }

  double latency = 0, per_byte = 0;        // seconds, without other flows
  std::vector<double> leaving, entering;   // [servers] fractions of the bytes that leave and enter by its interface
  std::vector<int> touched;                // the servers for which one of these is not 0

 private:
  Links links_;
  std::vector<double> received_, pair_;  // pair_: [servers, servers] the parts of the bytes on links of single pairs
  std::vector<int> pairs_;               // for which pair_ is not 0
};

}  // namespace dapple
