// Execution of a schedule under the cost model: the seconds of one step.
//
// A worker runs its actions strictly in order. A forward waits for its transfer from the stage before, a backward for
// its transfer from the stage after. A transfer starts when its producer has ended and its channel (one boundary, one
// direction) is free, first in first out. The AllReduces of one worker's stages run one at a time, in the order in
// which their gradients are complete. Transfers and rings that use the same direction of a server's network interface
// share it in equal parts. A flow first waits for its latency. Then it moves, at the rate of the slowest direction that
// it uses.
// dapple_tf/simulator/engine.py is the same in Python; the tests hold both equal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace dapple {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNever = std::numeric_limits<double>::quiet_NaN();

enum Kind { kForward = 0, kBackward = 1, kWeights = 2, kInputs = 3 };

// An action in 64 bits, as graph_passes' schedules are encoded: stage from bit 34 on, kind in bits 32 and 33.
constexpr int kKindShift = 32, kStageShift = 34;
constexpr int64_t kMicroBatchMask = (int64_t{1} << kKindShift) - 1;
constexpr int64_t kNone = -1;

inline int64_t encode(int stage, Kind kind, int64_t micro_batch) {
  return (int64_t{stage} << kStageShift) | (int64_t{kind} << kKindShift) | micro_batch;
}
inline int stage_of(int64_t code) { return static_cast<int>(code >> kStageShift); }
inline Kind kind_of(int64_t code) { return static_cast<Kind>((code >> kKindShift) & 3); }
inline int64_t micro_batch_of(int64_t code) { return code & kMicroBatchMask; }

// The actions of each worker, in rows of equal length that end with kNone, and the worker of each stage.
struct Order {
  int workers = 0, stages = 0;
  int64_t micro_batches = 0, length = 0;
  bool simple = false;  // each stage has one forward and one backward of every micro-batch, and nothing else
  int64_t settled = 0;  // the steady phase has begun by the backward of this micro-batch; for `steady_period`
  std::vector<int64_t> actions;
  std::vector<int> worker_of;
};

// Seconds of every stage; of every micro-batch where `columns` is M instead of 1. Arrays are [stages, columns].
struct Seconds {
  int64_t columns = 1;
  const double *forward, *backward, *weights, *send_forward, *send_backward;
  // Whether the result of an action is sent together with the result of the next micro-batch; null: none is.
  const uint8_t *forward_together = nullptr, *backward_together = nullptr;
};

// The interface directions that flows share. Of S stages flow s is the transfer from stage s to the next one, S + s
// the transfer of gradients back to stage s, and 2 S + s the ring of stage s. Directions in which no flow can slow
// another one down are left out.
struct Flows {
  struct Use {
    int direction;
    double demand;  // the part of the direction's bandwidth that the flow uses alone
  };
  std::vector<std::vector<Use>> uses;  // [3 S]
  std::vector<std::vector<int>> near;  // [3 S] the other flows that use one of the same directions
  std::vector<double> latency;         // [3 S] seconds
  int directions = 0;
};

// The rings of each stage: one, or one for each layer where AllReduce overlaps backward.
struct Rings {
  struct Ring {
    double before;   // seconds from the end of its own gradients to the end of the stage's last gradients
    double seconds;  // that it takes without other flows, latency included
  };
  std::vector<std::vector<Ring>> of_stage;
  std::vector<double> exposed;  // [S] seconds of AllReduce after the last gradients, without other flows
};

// Where the times of events are written, arrays [S, M] of seconds: starts and ends of forwards, backwards, weight
// gradients, and transfers forward and backward over the boundary after each stage.
struct Times {
  double *start[3], *end[3], *start_send[2], *end_send[2];
};

class Engine {
 public:
  // Return the end of the step. Infinity for an order that deadlocks, and where the step would not end before
  // `ceiling`. `times`: where events are recorded; null: nowhere.
  double run(const Order& order, const Seconds& seconds, const Flows* flows, const Rings& rings, double ceiling,
             const Times* times = nullptr);
  double steady_period() const { return period_; }
  // The end of the last ring of each stage; NaN where it did not run.
  const std::vector<double>& ring_end() const { return ring_end_; }
  int64_t done() const { return done_; }                             // actions that ran

 private:
  enum Phase { kIdle, kLatency, kEmpty, kMoves };
  struct Flow {
    double begin = 0, seconds = 0;  // when it began, and the seconds that it takes without other flows
    double left = 0;                // seconds that its remaining bytes take without other flows, at the time `since`
    double since = 0, factor = 1;   // factor: how many times longer they take now
    Phase phase = kIdle;
    bool slowed = false;
    size_t index = 0;  // in `busy_` and `due_`, while it is not idle
  };
  struct Sending {  // one transfer with the results of `count` micro-batches, the last of which is `last`
    double ready, seconds;
    int64_t last;
    int count;
  };
  struct WaitingRing {
    double ready, seconds;
    int stage;
    bool last;  // whether it is the last ring of its stage
  };

  size_t earliest() const;
  double factor(int flow) const;
  void count(int flow, int change, double now);
  void begin(int flow, double time, double latency, double seconds);
  void move(int flow, double now);
  void add_busy(int flow);
  void remove_busy(size_t index);

  const Flows* flows_ = nullptr;
  std::vector<Flow> state_;
  std::vector<int> counts_, busy_;  // the number of moving flows of each direction; the flows that are not idle
  std::vector<double> due_;         // when the next event of each busy flow is
  std::vector<double> arrived_[2], free_[2], now_, left_, ring_free_, ring_end_, unsent_seconds_;
  std::vector<std::vector<Sending>> queue_[2];
  std::vector<size_t> begun_[2];
  std::vector<Sending> under_way_[2];
  std::vector<int64_t> head_, missing_;
  std::vector<double> complete_;
  std::vector<int> unsent_, waiting_, ring_of_;
  std::vector<std::vector<WaitingRing>> rings_;  // of each worker
  std::vector<size_t> begun_rings_;
  // Not of bytes: a write through a pointer to bytes may change any object, so the compiler would read all again.
  std::vector<int> waits_, turned_, has_inputs_;
  double period_ = 0;
  int64_t done_ = 0;
};

// The index of the first of the earliest events. A loop over all is faster than a tree: few flows are busy at once.
inline size_t Engine::earliest() const {
  double least[2] = {kInfinity, kInfinity};  // of events with even and with odd numbers: two independent chains
  size_t i = 0;
  for (; i + 1 < due_.size(); i += 2)
    for (int k = 0; k < 2; ++k) least[k] = std::min(least[k], due_[i + k]);
  const double first = std::min(std::min(least[0], least[1]), due_.back());
  for (i = 0; due_[i] != first;) ++i;
  return i;
}

inline double Engine::factor(int flow) const {
  double found = 1;
  for (const auto& use : flows_->uses[flow]) found = std::max(found, counts_[use.direction] * use.demand);
  return found;
}

inline void Engine::count(int flow, int change, double now) {
  for (const auto& use : flows_->uses[flow]) counts_[use.direction] += change;
  for (const int other : flows_->near[flow]) {
    Flow& f = state_[other];
    if (f.phase != kMoves) continue;
    const double slower = factor(other);
    if (slower == f.factor) continue;
    f.left = std::max(0.0, f.left - (now - f.since) / f.factor);
    f.since = now, f.factor = slower, due_[f.index] = now + f.left * slower, f.slowed = true;
  }
}

inline void Engine::begin(int flow, double time, double latency, double seconds) {
  Flow& f = state_[flow];
  const double wait = std::min(latency, seconds);
  f.phase = kLatency, f.slowed = false, f.begin = time, f.seconds = seconds, f.left = seconds - wait;
  due_[f.index] = time + wait;
}

inline void Engine::move(int flow, double now) {
  Flow& f = state_[flow];
  if (f.left <= 0) {
    f.phase = kEmpty, due_[f.index] = now;
    return;
  }
  f.phase = kMoves, f.factor = 1;
  count(flow, 1, now);
  f.since = now, f.factor = factor(flow);
  if (f.factor == 1 && !f.slowed) {
    due_[f.index] = f.begin + f.seconds;
  } else {
    due_[f.index] = now + f.left * f.factor, f.slowed = true;
  }
}

inline void Engine::add_busy(int flow) {
  state_[flow].index = busy_.size();
  busy_.push_back(flow), due_.push_back(kInfinity);
}

inline void Engine::remove_busy(size_t index) {
  busy_[index] = busy_.back(), due_[index] = due_.back(), state_[busy_[index]].index = index;
  busy_.pop_back(), due_.pop_back();
}

inline double Engine::run(const Order& order, const Seconds& seconds, const Flows* flows, const Rings& rings,
                          double ceiling, const Times* times) {
  constexpr double kAlmost = 1 - 1e-9;  // allows for rounding: the seconds left are a sum from which others were taken
  const int stages = order.stages, workers = order.workers;
  const int64_t M = order.micro_batches, columns = seconds.columns, cells = stages * M;
  const bool shares = flows != nullptr && flows->directions > 0;
  flows_ = flows;
  const auto action_seconds = [&](Kind kind, int s, int64_t column) {
    const int64_t at = s * columns + column;
    switch (kind) {
      case kForward: return seconds.forward[at];
      case kBackward: return seconds.backward[at];
      case kWeights: return seconds.weights[at];
      default: return seconds.backward[at] - (seconds.weights ? seconds.weights[at] : 0.0);
    }
  };
  for (int way = 0; way < 2; ++way) {
    arrived_[way].assign(cells, kNever);
    free_[way].assign(stages, 0);
    queue_[way].resize(stages), begun_[way].assign(stages, 0), under_way_[way].resize(stages);
    for (auto& queue : queue_[way]) queue.clear();
  }
  now_.assign(workers, 0), head_.assign(workers, 0), left_.assign(workers, kInfinity);
  missing_.assign(stages, 0), unsent_.assign(workers, 0), unsent_seconds_.assign(workers, 0);
  ring_free_.assign(workers, 0), ring_end_.assign(stages, kNever);
  rings_.resize(workers), begun_rings_.assign(workers, 0);
  for (auto& queue : rings_) queue.clear();
  turned_.assign(M, 0), has_inputs_.assign(cells, 0);
  for (int s = 0; s < stages; ++s)
    left_[order.worker_of[s]] = std::min(left_[order.worker_of[s]], rings.exposed[s]);
  for (int s = 0; s < stages && order.simple; ++s) {
    left_[order.worker_of[s]] += M * (seconds.forward[s] + seconds.backward[s]);
    missing_[s] = M;
  }
  for (int w = 0; w < workers && !order.simple; ++w) {
    for (int64_t i = 0; i < order.length; ++i) {
      const int64_t code = order.actions[w * order.length + i];
      if (code == kNone) break;
      const int s = stage_of(code);
      left_[w] += action_seconds(kind_of(code), s, columns > 1 ? micro_batch_of(code) : 0);
      missing_[s] += kind_of(code) != kForward;
    }
  }
  if (shares) state_.assign(3 * stages, Flow{}), counts_.assign(flows->directions, 0);
  busy_.clear(), due_.clear();
  const auto is_flow = [&](int flow) { return shares && !flows->uses[flow].empty(); };
  ring_of_.assign(workers, -1), complete_.assign(stages, 0);
  const auto ring_idle = [&](int w) { return ring_of_[w] < 0 || state_[2 * stages + ring_of_[w]].phase == kIdle; };
  const auto begin_ring = [&](int w) {
    const WaitingRing& ring = rings_[w][begun_rings_[w]++];
    const int flow = 2 * stages + ring.stage;
    ring_of_[w] = ring.stage;
    add_busy(flow);
    begin(flow, std::max(ring.ready, ring_free_[w]), flows->latency[flow], ring.seconds);
  };
  const auto arrive = [&](int way, int boundary, int64_t m, double begins, double ends) {
    const int64_t at = boundary * M + m;
    arrived_[way][at] = ends;
    if (times) times->start_send[way][at] = begins, times->end_send[way][at] = ends;
  };
  waiting_.resize(workers), waits_.assign(workers, 1);
  for (int w = 0; w < workers; ++w) waiting_[w] = workers - 1 - w;
  // The steady period is the mean time on stage 0 from one backward to the next, over these micro-batches.
  const int64_t settled = std::min<int64_t>(M - 1, order.settled), twice = M - 1;
  double steady = 0;
  period_ = 0, done_ = 0;
  while (true) {
    while (!waiting_.empty()) {
      const int w = waiting_.back();
      waiting_.pop_back();
      waits_[w] = 0;
      while (head_[w] < order.length) {
        const int64_t code = order.actions[w * order.length + head_[w]];
        if (code == kNone) break;
        const int s = stage_of(code);
        const Kind kind = kind_of(code);
        const int64_t m = micro_batch_of(code), column = columns > 1 ? m : 0, at = s * M + m;
        double start = now_[w];
        int way = -1, target = -1;
        if (kind == kForward) {
          if (s) {
            const double arrival = arrived_[0][at - M];
            if (std::isnan(arrival)) break;
            start = std::max(start, arrival);
          }
          if (s + 1 < stages) way = 0, target = s + 1;
        } else if (kind == kWeights) {
          if (!has_inputs_[at]) break;
        } else {
          if (s + 1 < stages) {
            const double arrival = arrived_[1][at];  // gradients arrive only after this stage's forward
            if (std::isnan(arrival)) break;
            start = std::max(start, arrival);
          } else if (!turned_[m]) {
            break;
          }
          if (s) way = 1, target = s - 1;
        }
        const double own = action_seconds(kind, s, column), end = start + own;
        if (times) {
          const int which = kind == kForward ? 0 : kind == kWeights ? 2 : 1;
          times->start[which][at] = start, times->end[which][at] = end;
        }
        if (kind == kForward) {
          if (s + 1 == stages) turned_[m] = 1;
        } else if (kind != kWeights) {
          has_inputs_[at] = 1;
          if (s == 0 && m == settled) steady = end;
          if (s == 0 && m == twice && twice > settled) period_ = (end - steady) / (twice - settled);
        }
        now_[w] = end;
        ++head_[w], ++done_;
        left_[w] -= own;
        if (end + left_[w] * kAlmost >= ceiling) return kInfinity;
        if (way >= 0) {
          const int boundary = std::min(s, target), to = order.worker_of[target];
          if (to == w) {
            arrive(way, boundary, m, end, end);
          } else {
            const double* send = way == 0 ? seconds.send_forward : seconds.send_backward;
            const uint8_t* together = way == 0 ? seconds.forward_together : seconds.backward_together;
            ++unsent_[w], unsent_seconds_[w] += send[boundary * columns + column];
            if (!(together && together[s * columns + column])) {
              const int flow = way * stages + boundary;
              const double taken = unsent_seconds_[w];
              if (!is_flow(flow)) {
                const double begins = std::max(end, free_[way][boundary]);
                free_[way][boundary] = begins + taken;
                for (int i = 0; i < unsent_[w]; ++i) arrive(way, boundary, m - i, begins, begins + taken);
                if (!waits_[to]) waiting_.push_back(to), waits_[to] = 1;
              } else if (state_[flow].phase == kIdle) {
                under_way_[way][boundary] = {end, taken, m, unsent_[w]};
                add_busy(flow);
                begin(flow, std::max(end, free_[way][boundary]), flows->latency[flow] * unsent_[w], taken);
              } else {
                queue_[way][boundary].push_back({end, taken, m, unsent_[w]});
              }
              unsent_[w] = 0, unsent_seconds_[w] = 0;
            }
          }
        }
        if (kind != kForward && --missing_[s] == 0) {
          complete_[s] = end;
          const auto& own_rings = rings.of_stage[s];
          for (size_t r = 0; r < own_rings.size(); ++r) {
            const double ready = std::max(start, end - own_rings[r].before);
            const bool last = r + 1 == own_rings.size();
            if (is_flow(2 * stages + s)) {
              rings_[w].push_back({ready, own_rings[r].seconds, s, last});
              if (rings_[w].size() == begun_rings_[w] + 1 && ring_idle(w)) begin_ring(w);
            } else {  // then the rings of the worker's other stages share no interface either
              ring_free_[w] = std::max(ready, ring_free_[w]) + own_rings[r].seconds;
              if (last) ring_end_[s] = std::max(end, ring_free_[w]);
            }
          }
        }
      }
    }
    if (busy_.empty()) break;
    const size_t chosen = earliest();
    const int flow = busy_[chosen], way = flow / stages, s = flow % stages;
    Flow& f = state_[flow];
    const double time = due_[chosen];
    if (f.phase == kLatency) {
      move(flow, time);
      continue;
    }
    if (f.phase == kMoves) count(flow, -1, time);
    f.phase = kIdle;
    if (way == 2) {
      const int w = order.worker_of[s];
      remove_busy(chosen);
      ring_free_[w] = time;
      if (rings_[w][begun_rings_[w] - 1].last) ring_end_[s] = std::max(time, complete_[s]);
      if (begun_rings_[w] < rings_[w].size()) begin_ring(w);
      continue;
    }
    free_[way][s] = time;
    const Sending& sent = under_way_[way][s];
    for (int64_t m = sent.last - sent.count + 1; m <= sent.last; ++m) arrive(way, s, m, f.begin, time);
    if (begun_[way][s] < queue_[way][s].size()) {
      const Sending next = queue_[way][s][begun_[way][s]++];
      under_way_[way][s] = next;
      begin(flow, std::max(time, next.ready), flows->latency[flow] * next.count, next.seconds);
    } else {
      remove_busy(chosen);
    }
    const int to = order.worker_of[s + 1 - way];
    waiting_.push_back(to), waits_[to] = 1;
  }
  double last = 0;
  for (int s = 0; s < stages; ++s) {
    if (std::isnan(ring_end_[s])) return kInfinity;
    last = std::max(last, ring_end_[s]);
  }
  return last;
}

}  // namespace dapple
