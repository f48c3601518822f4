// Cutting a chain of blocks into stages, by dynamic programming; dapple_tf/planner/partition.py says what it computes,
// and is the same in NumPy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace dapple {

// The ways in which a stage can follow others: `Ways` of partition.py.
struct Ways {
  int64_t count;
  const int32_t *state, *before, *row;  // [count]
  const double *link, *ring;            // [count, 2] latency and seconds per byte
  const uint8_t* alike;                 // [count]
};

struct ChainOfBlocks {
  int blocks;
  const double* seconds;      // [rows, blocks, blocks + 1] of stages, by their first block and their end
  const double* boundary;     // [blocks + 1] bytes
  const double* parameters;   // [blocks + 1] bytes, sums
  const uint8_t* splittable;  // [blocks + 1]
};

// Whether two ways differ only in the state before and in the link.
inline bool same_stage(const Ways& w, int64_t a, int64_t b) {
  return w.state[a] == w.state[b] && w.row[a] == w.row[b] && w.ring[2 * a] == w.ring[2 * b] &&
         w.ring[2 * a + 1] == w.ring[2 * b + 1];
}

// Fill in the least value of each state and number of blocks, [states, blocks + 1], with the way and the first block of
// the last stage. `best` begins as infinity, but for the state without stages.
inline void partition(const ChainOfBlocks& c, const Ways& w, bool sum, bool latest, double limit, double* best,
                      int32_t* way, int32_t* first) {
  const int n = c.blocks;
  std::vector<double> entering(n);
  std::vector<int32_t> chosen(n);
  for (int64_t begin = 0, end = 0; begin < w.count; begin = end) {
    while (end < w.count && same_stage(w, begin, end)) ++end;
    std::fill(entering.begin(), entering.end(), std::numeric_limits<double>::infinity());
    for (int64_t k = begin; k < end; ++k) {
      const double* before = best + int64_t{w.before[k]} * (n + 1);
      for (int i = 0; i < n; ++i) {
        if (w.alike[k] == 0 && !c.splittable[i]) continue;
        const double sent = w.link[2 * k] + w.link[2 * k + 1] * c.boundary[i];
        const double value = sum ? before[i] + sent : std::max(before[i], sent);
        if (value < entering[i]) entering[i] = value, chosen[i] = static_cast<int32_t>(k);
      }
    }
    const int64_t at = int64_t{w.state[begin]} * (n + 1);
    const double latency = w.ring[2 * begin], per_byte = w.ring[2 * begin + 1];
    for (int step = 0; step < n; ++step) {
      const int i = latest ? n - 1 - step : step;
      const double enters = entering[i];
      if (enters == std::numeric_limits<double>::infinity()) continue;
      const double* own = c.seconds + (int64_t{w.row[begin]} * n + i) * (n + 1);
      for (int j = i + 1; j <= n; ++j) {
        double seconds = own[j];
        const double bytes = c.parameters[j] - c.parameters[i];
        if (bytes > 0) seconds += latency + per_byte * bytes;
        if (seconds > limit) continue;
        const double value = sum ? enters + seconds : std::max(enters, seconds);
        if (value < best[at + j]) best[at + j] = value, way[at + j] = chosen[i], first[at + j] = i;
      }
    }
  }
}

// Write the first blocks of the stages whose sum of (cost of the stage + its `beside`)^2 is least; `least_squares` of
// dapple_tf/planner/search/balanced_cuts.py is the same in Python.
inline void least_squares(int blocks, int stages, const double* sums, const double* more_sums, const double* factors,
                          const double* beside, int64_t* starts) {
  const int n = blocks;
  std::vector<double> best(n + 1, std::numeric_limits<double>::infinity()), following;
  std::vector<int32_t> choice(int64_t{stages} * (n + 1), 0);
  best[0] = 0;
  for (int s = 0; s < stages; ++s) {
    following.assign(n + 1, std::numeric_limits<double>::infinity());
    for (int end = s + 1; end <= n - (stages - 1 - s); ++end) {
      for (int start = end - 1; start >= s; --start) {
        const double own = sums[end] - sums[start] + factors[s] * (more_sums[end] - more_sums[start]) + beside[s];
        if (own * own >= following[end]) break;  // with an earlier start the stage costs even more
        const double total = best[start] + own * own;
        if (total < following[end]) following[end] = total, choice[int64_t{s} * (n + 1) + end] = start;
      }
    }
    best.swap(following);
  }
  for (int s = stages - 1, end = n; s >= 0; --s) starts[s] = end = choice[int64_t{s} * (n + 1) + end];
}

}  // namespace dapple
