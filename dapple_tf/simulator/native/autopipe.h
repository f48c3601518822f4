// AutoPipe's pipeline simulator: iteration time, critical path and master stage (AutoPipe, section III.B.1);
// dapple_tf/planner/systems/autopipe.py says what it computes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace dapple {

// A 1F1B pipeline of n stages and m micro-batches; FP is kind 0, BP kind 1.
class OneForwardOneBackward {
 public:
  OneForwardOneBackward(int stages, int64_t micro_batches) : n_(stages), m_(micro_batches) {}

  // Return the iteration time. `f`, `b`: seconds of each stage.
  double run(const double* f, const double* b, double comm) {
    const auto own = [&](int kind, int x) { return kind == 0 ? f[x] : b[x]; };
    std::vector<double> start(2 * n_ * m_, std::numeric_limits<double>::infinity()), free(n_, 0);
    from_own_.assign(2 * n_ * m_, 0);
    std::vector<int64_t> head(n_, 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (int x = 0; x < n_; ++x) {
        for (; head[x] < 2 * m_; ++head[x], moved = true) {
          const Operation o = operation(head[x], ahead(x));
          const int neighbour = o.kind == 0 ? x - 1 : x + 1;
          const bool receives = neighbour >= 0 && neighbour < n_;
          const double ready =
              receives ? start[cell(o.kind, neighbour, o.micro_batch)] + own(o.kind, neighbour) : 0.0;
          if (ready == std::numeric_limits<double>::infinity()) break;
          // If both inputs are ready at the same time, the path comes from the stage that is nearer to the last stage.
          from_own_[cell(o.kind, x, o.micro_batch)] = o.kind == 0 ? head[x] > 0 && (x == 0 || free[x] >= ready)
                                                                  : x == n_ - 1 || free[x] > ready;
          double& begin = start[cell(o.kind, x, o.micro_batch)];
          begin = std::max(free[x], ready) + (receives ? comm : 0.0);
          free[x] = begin + own(o.kind, x);
        }
      }
    }
    return free[0];
  }

  // Return the stage that has most operations of the 1F1B phase on the critical path, which ends with the last BP of
  // stage 0. If several stages have equally many, return the last of them. Call it after `run`.
  int master_stage() const {
    std::vector<int64_t> counts(n_, 0);
    int x = 0;
    Operation o{1, m_ - 1};
    while (true) {
      const int64_t index = index_of(o, ahead(x));
      counts[x] += ahead(x) <= index && index < 2 * m_ - ahead(x);
      if (from_own_[cell(o.kind, x, o.micro_batch)]) {
        o = operation(index - 1, ahead(x));
      } else if (o.kind == 0 && x == 0) {
        break;
      } else {
        x += o.kind == 0 ? -1 : 1;
      }
    }
    int master = n_ - 1;
    for (int stage = n_ - 1; stage >= 0; --stage)
      if (counts[stage] > counts[master]) master = stage;
    return master;
  }

 private:
  struct Operation {
    int kind;
    int64_t micro_batch;
  };

  size_t cell(int kind, int x, int64_t micro_batch) const { return (kind * n_ + x) * m_ + micro_batch; }
  int64_t ahead(int x) const { return std::min<int64_t>(n_ - 1 - x, m_); }  // FPs of the Warmup phase
  // The operations of a stage: Warmup, then FP and BP in turn (the 1F1B phase), then the BPs of the Cooldown.
  Operation operation(int64_t index, int64_t ahead) const {
    if (index < ahead) return {0, index};
    if (index >= 2 * m_ - ahead) return {1, index - m_};
    const int64_t pair = (index - ahead) / 2;
    return (index - ahead) % 2 == 0 ? Operation{0, ahead + pair} : Operation{1, pair};
  }
  int64_t index_of(const Operation& o, int64_t ahead) const {
    if (o.kind == 0) return o.micro_batch < ahead ? o.micro_batch : 2 * o.micro_batch - ahead;
    return o.micro_batch < m_ - ahead ? ahead + 2 * o.micro_batch + 1 : m_ + o.micro_batch;
  }

  int n_;
  int64_t m_;
  // [2, n, m] whether the critical path to an operation comes from the operation before it on the same stage.
  std::vector<uint8_t> from_own_;
};

}  // namespace dapple
