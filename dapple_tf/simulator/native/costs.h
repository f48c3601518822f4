// The cost model of a planning problem: seconds, bytes and flows of the stages of a layout, in whole rows.
#pragma once

#include "engine.h"
#include "transfer.h"

namespace dapple {

// A planning problem as arrays, filled in by Python (dapple_tf/planner/search/annealer.py). The seconds of a layer are
// piecewise linear in the rows n of a replica: a + b n, where each segment between two measured batch sizes has its own
// a and b. Arrays marked "sums" are prefix sums over the blocks. Bytes are those of the profile's batch.
struct Problem {
  int32_t blocks, layers, kinds, segments, devices, servers, sizes;
  const double* breaks;  // [segments - 1] numbers of rows at which one segment ends and the next begins
  const double *forward_a, *forward_b, *backward_a, *backward_b;  // [kinds, segments, blocks + 1] sums
  const double *parameters, *stash;                               // [blocks + 1] sums
  const double* working;                                          // [blocks]
  const double* boundary;         // [blocks + 1] bytes that cross the cut before each block; 0 at both ends
  const uint8_t* splittable;      // [blocks + 1] whether stages of unequal shares can meet before each block
  const double *layer_backward_a, *layer_backward_b;  // [kinds, segments, layers]; read with overlap only
  const double* layer_parameters;                     // [layers]
  const int32_t* positions;                           // [blocks + 1] the first layer of each block
  const int32_t *kind, *server;                       // [devices]
  const double* memory;                               // [kinds] bytes of a device
  const double *inside, *inside_latency;              // [servers] seconds per byte, seconds
  double interface_, interface_latency;
  const double *own, *own_latency;  // [servers, servers] of links between two servers; 0: they have none
  const int64_t *size, *micro_batches;  // [sizes] rows of a micro-batch, and how many a step has
  double batch;                         // rows of the profile's batch
  // Bytes held for each byte of parameters: those that every replica holds, and those that the replicas divide up.
  double fixed_factor, shared_factor;
  uint8_t overlap, contention, whole_rows, recompute_all, may_recompute, own_links;
  int32_t slope;        // replaces Layout::ahead of all stages, unless it is kAnySlope; above kMostSlope: K_i = M
  int32_t workers;      // the number that every layout must have; 0: any number
  int32_t least_rows;   // rows of a micro-batch that the devices of a worker must at least get on average
  int32_t most_chunks;  // the most stages that a worker may have
  const uint8_t* may_have;  // [most_chunks + 1] whether a worker may have so many stages
};

constexpr int kAnySlope = -1, kMostSlope = 8, kAllAhead = 1 << 20;  // K_i = M

constexpr int kIdleDevice = -1;
constexpr int kPeriods = 2;  // a long steady phase is measured from `settled` micro-batches to kPeriods times as many
constexpr double kUnfit = 1e12;  // the least seconds of a layout that does not fit; more for each byte that it lacks

// Stages and their devices. Worker w of W runs the stages w, W + w, 2 W + w ... of `chunks` W.
struct Layout {
  int size = 0, workers = 1, chunks = 1;
  std::vector<int> starts;         // [most stages + 1] first block of each stage; the number of blocks after the last
  std::vector<int> owner;          // [devices] the worker of each device, in the device order, or kIdleDevice
  std::vector<int> device_at;      // [devices] the device order
  std::vector<uint8_t> recompute;  // [most stages]
  // [most stages] K_i - K_(i + 1), which memory and M may reduce; the entry of the last stage is not read. All 1 is
  // policy A, all 2 is policy B. A number -q means: as many micro-batches as the pipeline completes while one
  // micro-batch is computed here, goes to the next stage and comes back, if its two transfers take q times as long as
  // alone.
  std::vector<int> ahead;
  int stages() const { return workers * chunks; }
};

// Return a layout of all devices on worker 0, in the order of their numbers, without cuts.
inline Layout empty_layout(const Problem& problem, int z, int workers, int chunks) {
  Layout l;
  const int room = std::min(problem.blocks, std::min(problem.devices, problem.blocks) * problem.most_chunks) + 1;
  l.size = z, l.workers = workers, l.chunks = chunks;
  l.starts.assign(room, 0), l.recompute.assign(room, 0), l.ahead.assign(room, 2);
  l.owner.resize(problem.devices), l.device_at.resize(problem.devices);
  for (int d = 0; d < problem.devices; ++d) l.device_at[d] = d;
  l.starts[l.stages()] = problem.blocks;
  return l;
}

struct Step {
  double seconds = kInfinity;
  bool fits = false;
  int64_t work = 0;  // grows with the actions that were simulated; a search ends after an amount of it
};

// Computes the step of layouts. Its arrays are used again for the next layout, so each thread needs an evaluator of its
// own.
class Evaluator {
 public:
  explicit Evaluator(const Problem& problem);

  // Return the step without contention; infinity where it reaches `ceiling`. `exact`: run all micro-batches; else a
  // long steady phase is extrapolated from a part of it.
  Step alone(const Layout& layout, double ceiling, bool exact);
  Step estimate(const Layout& layout, double ceiling);
  // Return the step with contention. Call it after `alone` of the same layout; `step`: what that returned.
  Step shared(const Layout& layout, const Step& step, double ceiling, bool exact);

  const std::vector<int>& warm_up() const { return warm_up_; }
  // Return the seconds of all micro-batches with the given K_i; infinity where memory does not hold them. Call it after
  // `alone` of the same layout.
  double with_warm_up(const Layout& layout, const std::vector<int>& warm_up);
  // The rows of a micro-batch that each device computes, after `alone` of a layout.
  std::vector<int64_t> rows_of_devices() const {
    std::vector<int64_t> found(p_.devices, 0);
    for (size_t i = 0; i < devices_.size(); ++i) found[devices_[i]] = rows_[i];
    return found;
  }

 private:
  double compute_costs(const Layout& layout);
  bool share(const Layout& layout, int w);
  void share_by_kind(int64_t rows, const std::vector<int>& kinds, const std::vector<double>& forward,
                     const std::vector<double>& backward, std::vector<int64_t>& found);
  std::vector<int64_t> cut_rows(int64_t rows, const std::vector<double>& speeds) const;
  int segment(double rows) const;
  double seconds(const double* a, const double* b, int kind, double rows, int first, int end) const;
  void transfer(int from, int to, double* latency, double* per_byte);
  void ring(int w, double* latency, double* per_byte) const;
  void rings_of(const Layout& layout, int s, int w, int kind, double rows, double latency, double per_byte);
  double bound(int stages, int64_t micro_batches) const;
  bool set_warm_up(const Layout& layout, int64_t micro_batches);
  double recurrence(const std::vector<int>& warm_up, int64_t micro_batches, double ceiling, double* period);
  const Order& early_backward(const std::vector<int>& warm_up, int64_t micro_batches);
  const Order& interleaved(int workers, int chunks, int64_t micro_batches);
  double interleaved_lacking(const Layout& layout, const Order& order) const;
  const Flows& flows(const Layout& layout);
  double run(const Order& order, const Flows* flows, double ceiling);
  double least_period(const Layout& layout) const;
  int64_t settled() const;
  int64_t shorter(const Layout& layout, int64_t micro_batches) const;

  const Problem& p_;
  Engine engine_;
  Order order_;
  Flows flows_;
  Rings rings_;
  int orders_workers_ = 0, orders_chunks_ = 0;
  int64_t orders_micro_batches_ = 0;
  Order interleaved_;
  std::vector<int> devices_, offsets_;      // the devices of each worker that get rows
  std::vector<int64_t> cuts_, rows_;        // cut points of each worker's rows, one more than devices; rows of a device
  std::vector<int64_t> whole_;              // [workers] the last cut point, which stands for all rows
  std::vector<double> most_rows_;           // [workers] rows of the device with most
  std::vector<double> forward_, backward_, send_, exposed_;  // [stages] seconds
  // [stages] bytes of a device: fixed ones, of the stash of a row, and of the working set of a row.
  std::vector<double> fixed_, stash_, work_;
  // [workers] bytes for each row of a device that are left for stashes and working set: (memory - fixed bytes) / rows,
  // of the device that has least.
  std::vector<double> room_;
  std::vector<int> warm_up_, by_worker_;    // by_worker_: the devices in use, sorted by their worker
  std::vector<double> now_, free_forward_, free_backward_, arrival_;
  std::vector<double> kind_rows_;           // [kinds] the most rows of a device of this kind; 0: there is none
  std::vector<double> moving_;              // [servers] seconds in which its interface moves one micro-batch, one way
  Transfer transfer_;
  struct Load { int direction; double demand; };
  std::vector<std::vector<Load>> loads_;
  std::vector<int> direction_count_, direction_index_;
  std::vector<double> direction_most_;
  std::vector<std::vector<int>> users_;
  std::vector<int> scratch_;                // counts of devices, or marks of flows
};

inline Evaluator::Evaluator(const Problem& problem)
    : p_(problem),
      transfer_({p_.servers, p_.inside, p_.inside_latency, p_.interface_, p_.interface_latency, p_.own, p_.own_latency,
                 p_.own_links != 0}) {
  kind_rows_.assign(p_.kinds, 0);
  moving_.assign(p_.servers, 0);
}

// The segment in which this number of rows lies.
inline int Evaluator::segment(double rows) const {
  int found = 0;
  while (found + 1 < p_.segments && rows > p_.breaks[found]) ++found;
  return found;
}

// The seconds of the blocks `first` to `end` (exclusive) for these rows, from prefix sums of a and of b.
inline double Evaluator::seconds(const double* a, const double* b, int kind, double rows, int first, int end) const {
  const int64_t at = (int64_t{kind} * p_.segments + segment(rows)) * (p_.blocks + 1);
  return (a[at + end] - a[at + first]) + rows * (b[at + end] - b[at + first]);
}

// Cut rows in proportion to speeds, so that the largest of rows / speed is least; earlier devices get the remainder.
inline std::vector<int64_t> Evaluator::cut_rows(int64_t rows, const std::vector<double>& speeds) const {
  constexpr double kSame = 1e-9;
  double total = 0;
  for (const double speed : speeds) total += speed;
  std::vector<int64_t> counts(speeds.size());
  int64_t given = 0;
  for (size_t i = 0; i < speeds.size(); ++i) {
    counts[i] = static_cast<int64_t>(rows * speeds[i] / total * (1 + kSame));
    given += counts[i];
  }
  for (; given < rows; ++given) {
    size_t chosen = 0;
    double least = kInfinity;
    for (size_t i = 0; i < speeds.size(); ++i) {
      if (speeds[i] > 0 && (counts[i] + 1) / speeds[i] < least * (1 - kSame)) {
        chosen = i, least = (counts[i] + 1) / speeds[i];
      }
    }
    ++counts[chosen];
  }
  return counts;
}

// Find the rows of each device for which the longest forward plus the longest backward is least; `share_by_kind` of
// dapple_tf/planner/row_shares.py is the same in Python.
inline void Evaluator::share_by_kind(int64_t rows, const std::vector<int>& kinds, const std::vector<double>& forward,
                                     const std::vector<double>& backward, std::vector<int64_t>& found) {
  constexpr double kSame = 1e-9;
  std::vector<double> speeds(kinds.size());
  bool zero = false;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const double both = forward[kinds[i]] + backward[kinds[i]];
    speeds[i] = both > 0 ? 1 / both : 1;
    zero = zero || forward[kinds[i]] <= 0 || backward[kinds[i]] <= 0;
  }
  found = cut_rows(rows, speeds);
  if (zero) return;
  std::vector<int64_t> counts(forward.size(), 0);
  bool proportional = true;
  for (const int k : kinds) {
    ++counts[k];
    const double ratio = forward[kinds[0]] * backward[k];
    proportional = proportional && std::abs(forward[k] * backward[kinds[0]] - ratio) <= kSame * ratio;
  }
  if (proportional) return;
  const auto longest = [&](const std::vector<int64_t>& of, const std::vector<double>& taken) {
    double most = 0;
    for (size_t i = 0; i < kinds.size(); ++i) most = std::max(most, of[i] * taken[kinds[i]]);
    return most;
  };
  const auto shortest = [&](const std::vector<double>& taken) {
    for (size_t i = 0; i < kinds.size(); ++i) speeds[i] = 1 / taken[kinds[i]];
    return longest(cut_rows(rows, speeds), taken);
  };
  const auto room = [&](double limit, const std::vector<int64_t>& most) {
    int64_t sum = 0;
    for (size_t k = 0; k < counts.size(); ++k)
      if (counts[k]) sum += counts[k] * std::min(most[k], static_cast<int64_t>(limit / backward[k] * (1 + kSame)));
    return sum;
  };
  double least = longest(found, forward) + longest(found, backward);
  const double shortest_forward = shortest(forward), shortest_backward = shortest(backward);
  std::vector<int64_t> caps(counts.size(), 0), most(counts.size(), 0);
  bool better = false;
  for (size_t q = 0; q < counts.size(); ++q) {  // the kind whose forward is the longest
    if (!counts[q]) continue;
    auto count = static_cast<int64_t>(std::ceil(shortest_forward / forward[q] * (1 - kSame)));
    while (count * forward[q] + shortest_backward < least * (1 - kSame)) {
      for (size_t k = 0; k < counts.size(); ++k)
        most[k] = counts[k] ? static_cast<int64_t>(count * forward[q] / forward[k] * (1 + kSame)) : 0;
      double low = shortest_backward * (1 - kSame), high = least * (1 - kSame) - count * forward[q];
      if (room(high, most) >= rows) {
        for (int i = 0; i < 50; ++i) {
          const double middle = (low + high) / 2;
          (room(middle, most) >= rows ? high : low) = middle;
        }
        least = count * forward[q] + high, better = true;
        for (size_t k = 0; k < counts.size(); ++k)
          caps[k] = counts[k] ? std::min(most[k], static_cast<int64_t>(high / backward[k] * (1 + kSame))) : 0;
      }
      ++count;
    }
  }
  if (!better) return;
  for (size_t i = 0; i < kinds.size(); ++i) speeds[i] = static_cast<double>(caps[kinds[i]]);
  found = cut_rows(rows, speeds);
}

// Divide the rows of a micro-batch among the devices of worker w, which are those of `devices_` from offsets_[w] on.
// Devices that get none are left out. Return false where the worker has no device, or more equal devices than the rows
// allow.
inline bool Evaluator::share(const Layout& layout, int w) {
  const int64_t rows = p_.size[layout.size];
  const int begin = offsets_[w], end = static_cast<int>(devices_.size()), r = end - begin;
  bool equal = true;
  for (int i = begin + 1; i < end; ++i) equal = equal && p_.kind[devices_[i]] == p_.kind[devices_[begin]];
  const bool too_many = int64_t{r} * p_.least_rows > rows;
  if (r == 0 || (equal && too_many)) return false;
  if (!equal) {
    std::vector<double> forward(p_.kinds, 0), backward(p_.kinds, 0);
    std::vector<int> kinds(r);
    const double part = static_cast<double>(rows) / r;
    for (int i = 0; i < r; ++i) kinds[i] = p_.kind[devices_[begin + i]];
    for (int k = 0; k < p_.kinds; ++k) {
      if (std::find(kinds.begin(), kinds.end(), k) == kinds.end()) continue;
      for (int s = w; s < layout.stages(); s += layout.workers) {
        forward[k] += seconds(p_.forward_a, p_.forward_b, k, part, layout.starts[s], layout.starts[s + 1]);
        backward[k] += seconds(p_.backward_a, p_.backward_b, k, part, layout.starts[s], layout.starts[s + 1]);
      }
    }
    bool same = true;
    for (const int k : kinds) same = same && forward[k] == forward[kinds[0]] && backward[k] == backward[kinds[0]];
    if (same && too_many) return false;
    if (!same) {
      std::vector<int64_t> found;
      share_by_kind(rows, kinds, forward, backward, found);
      int kept = begin;
      for (int i = 0; i < r; ++i) {
        if (!found[i]) continue;
        devices_[kept++] = devices_[begin + i];
        rows_.push_back(found[i]);
      }
      devices_.resize(kept);
      int64_t sum = 0;
      cuts_.push_back(0);
      for (int i = begin; i < kept; ++i) cuts_.push_back(sum += rows_[i]);
      whole_[w] = sum;
      return true;
    }
  }
  for (int i = 0; i <= r; ++i) cuts_.push_back(p_.whole_rows ? rows * i / r : i);
  for (int i = 0; i < r; ++i) rows_.push_back(rows * (i + 1) / r - rows * i / r);
  whole_[w] = p_.whole_rows ? rows : r;
  return true;
}

// Write the latency of a transfer between two workers, and its seconds per byte, without other flows. transfer_ then
// has the fractions of its bytes that pass each interface.
inline void Evaluator::transfer(int from, int to, double* latency, double* per_byte) {
  const int *senders = &devices_[offsets_[from]], *receivers = &devices_[offsets_[to]];
  transfer_.measure(
      offsets_[from + 1] - offsets_[from], [&](int i) { return p_.server[senders[i]]; }, &cuts_[offsets_[from] + from],
      offsets_[to + 1] - offsets_[to], [&](int j) { return p_.server[receivers[j]]; }, &cuts_[offsets_[to] + to]);
  *latency = transfer_.latency, *per_byte = transfer_.per_byte;
}

// Write the latency of an AllReduce on the devices of worker w, and its seconds per byte.
inline void Evaluator::ring(int w, double* latency, double* per_byte) const {
  const int r = offsets_[w + 1] - offsets_[w];
  *latency = *per_byte = 0;
  if (r == 1) return;
  double wait = 0, slowest = 0;
  for (int i = 0; i < r; ++i) {
    const int a = p_.server[devices_[offsets_[w] + i]], b = p_.server[devices_[offsets_[w] + (i + 1) % r]];
    if (a == b) {
      wait = std::max(wait, p_.inside_latency[a]), slowest = std::max(slowest, p_.inside[a]);
    } else if (p_.own_links && p_.own[a * p_.servers + b] > 0) {
      wait = std::max(wait, p_.own_latency[a * p_.servers + b]);
      slowest = std::max(slowest, p_.own[a * p_.servers + b]);
    } else {
      wait = std::max(wait, p_.interface_latency), slowest = std::max(slowest, p_.interface_);
    }
  }
  *latency = 2.0 * (r - 1) * wait;
  *per_byte = 2.0 * (r - 1) / r * slowest;
}

// Set the rings of stage s, which runs on worker w. `kind`, `rows`: of the device whose backward takes longest.
inline void Evaluator::rings_of(const Layout& layout, int s, int w, int kind, double rows, double latency,
                                double per_byte) {
  auto& rings = rings_.of_stage[s];
  rings.clear();
  const int first = layout.starts[s], end = layout.starts[s + 1];
  const auto taken = [&](double bytes) { return bytes > 0 ? latency + per_byte * bytes : 0.0; };
  if (!p_.overlap || offsets_[w + 1] - offsets_[w] == 1) {
    const double whole = taken(p_.parameters[end] - p_.parameters[first]);
    rings.push_back({0, whole});
    exposed_[s] = rings_.exposed[s] = whole;
    return;
  }
  const int64_t at = (int64_t{kind} * p_.segments + segment(rows)) * p_.layers;
  const int begin = p_.positions[first], stop = p_.positions[end];
  double before = 0, ready = 0, done = 0;
  const auto own = [&](int layer) { return p_.layer_backward_a[at + layer] + rows * p_.layer_backward_b[at + layer]; };
  for (int layer = begin; layer < stop; ++layer) before += own(layer);
  for (int layer = stop - 1; layer >= begin; --layer) {
    before -= own(layer), ready += own(layer);
    const double seconds = taken(p_.layer_parameters[layer]);
    if (seconds <= 0) continue;
    rings.push_back({std::max(0.0, before), seconds});
    done = std::max(done, ready) + seconds;
  }
  if (rings.empty()) rings.push_back({0, 0});
  exposed_[s] = rings_.exposed[s] = std::max(0.0, done - ready);
}

// Compute the costs of all stages. Return the bytes that all devices together lack to hold one micro-batch of each of
// their stages; infinity where a worker has no device or too many, or where stages of unequal shares meet at a cut
// whose tensors cannot be split.
inline double Evaluator::compute_costs(const Layout& layout) {
  const int workers = layout.workers, stages = layout.stages();
  devices_.clear(), cuts_.clear(), rows_.clear();
  offsets_.assign(workers + 1, 0), whole_.assign(workers, 0), most_rows_.assign(workers, 0);
  // A counting sort of the devices by worker, which keeps the device order.
  std::vector<int>& count = scratch_;
  count.assign(workers + 1, 0);
  for (const int w : layout.owner)
    if (w >= 0) ++count[w + 1];
  for (int w = 0; w < workers; ++w) count[w + 1] += count[w];
  by_worker_.assign(count[workers], 0);
  {
    std::vector<int> entry(count.begin(), count.end() - 1);
    for (size_t i = 0; i < layout.owner.size(); ++i)
      if (layout.owner[i] >= 0) by_worker_[entry[layout.owner[i]]++] = layout.device_at[i];
  }
  for (int w = 0; w < workers; ++w) {
    offsets_[w] = static_cast<int>(devices_.size());
    devices_.insert(devices_.end(), by_worker_.begin() + count[w], by_worker_.begin() + count[w + 1]);
    if (!share(layout, w)) return kInfinity;
  }
  offsets_[workers] = static_cast<int>(devices_.size());
  for (auto* cells : {&forward_, &backward_, &send_, &exposed_, &fixed_, &stash_, &work_}) cells->assign(stages, 0);
  room_.assign(workers, kInfinity);
  rings_.of_stage.resize(stages), rings_.exposed.assign(stages, 0);
  const double scale = p_.size[layout.size] / p_.batch;
  double lacking = 0;
  for (int w = 0; w < workers; ++w) {
    const int begin = offsets_[w], end = offsets_[w + 1], r = end - begin;
    double latency, per_byte;
    ring(w, &latency, &per_byte);
    std::fill(kind_rows_.begin(), kind_rows_.end(), 0);
    for (int i = begin; i < end; ++i) {
      const double rows = p_.whole_rows || whole_[w] != r ? static_cast<double>(rows_[i])
                                                          : static_cast<double>(p_.size[layout.size]) / r;
      double& most = kind_rows_[p_.kind[devices_[i]]];
      most = std::max(most, rows);
    }
    double all_fixed = 0, least_stash = 0, most_work = 0;
    for (int s = w; s < stages; s += workers) {
      const int first = layout.starts[s], stop = layout.starts[s + 1];
      const bool again = p_.recompute_all || layout.recompute[s];
      int slowest = 0;
      double longest = -1;
      for (int k = 0; k < p_.kinds; ++k) {
        if (kind_rows_[k] == 0) continue;
        const double f = seconds(p_.forward_a, p_.forward_b, k, kind_rows_[k], first, stop);
        double b = seconds(p_.backward_a, p_.backward_b, k, kind_rows_[k], first, stop);
        if (again) b += f;
        forward_[s] = std::max(forward_[s], f);
        if (b > longest) longest = b, slowest = k;
      }
      backward_[s] = longest;
      const double stash = (p_.stash[stop] - p_.stash[first]) / p_.batch;
      double work = 0;
      for (int block = first; block < stop; ++block) work = std::max(work, p_.working[block]);
      work /= p_.batch;
      stash_[s] = again ? p_.boundary[first] / p_.batch : stash;
      work_[s] = again ? work + stash : work;
      fixed_[s] = (p_.parameters[stop] - p_.parameters[first]) * (p_.fixed_factor + p_.shared_factor / r);
      all_fixed += fixed_[s], least_stash += stash_[s], most_work = std::max(most_work, work_[s]);
      rings_of(layout, s, w, slowest, kind_rows_[slowest], latency, per_byte);
    }
    for (int k = 0; k < p_.kinds; ++k) {
      if (kind_rows_[k] == 0) continue;
      const double room = (p_.memory[k] - all_fixed) / kind_rows_[k];
      room_[w] = std::min(room_[w], room);
      most_rows_[w] = std::max(most_rows_[w], kind_rows_[k]);
      lacking += std::max(0.0, all_fixed + kind_rows_[k] * (least_stash + most_work) - p_.memory[k]);
    }
  }
  if (lacking > 0) return lacking;
  double latency = 0, per_byte = 0;
  std::fill(moving_.begin(), moving_.end(), 0);
  for (int s = 0; s + 1 < stages && workers > 1; ++s) {
    const int from = s % workers, to = (s + 1) % workers;
    transfer(from, to, &latency, &per_byte);
    const double bytes = p_.boundary[layout.starts[s + 1]] * scale;
    // A server may be listed more than once. It counts once, because its fractions are set to 0.
    for (const int server : transfer_.touched) {
      // Activations that enter a server are followed by as many bytes of gradients that leave it, and vice versa.
      if (p_.contention) moving_[server] += (transfer_.leaving[server] + transfer_.entering[server]) * p_.interface_ * bytes;
      transfer_.leaving[server] = transfer_.entering[server] = 0;
    }
    if (!p_.splittable[layout.starts[s + 1]]) {
      const int n = offsets_[from + 1] - offsets_[from];
      bool same = n == offsets_[to + 1] - offsets_[to];
      for (int i = 0; same && i <= n; ++i)
        same = cuts_[offsets_[from] + from + i] * whole_[to] == cuts_[offsets_[to] + to + i] * whole_[from];
      if (!same) return kInfinity;
    }
    send_[s] = latency + per_byte * bytes;
  }
  return 0;
}

// A lower bound of the step: of each stage and each channel the time before its first micro-batch, its own time for all
// micro-batches, and the time after its last one.
inline double Evaluator::bound(int stages, int64_t micro_batches) const {
  double before = 0, drain = 0, found = 0;
  for (int s = 0; s < stages; ++s) {
    const double f = forward_[s], b = backward_[s], send = s ? send_[s - 1] : 0;
    if (s) {
      before += send, drain += send + backward_[s - 1];
      found = std::max(found, before + (micro_batches - 1) * send + f + b + drain);
    }
    drain = std::max(exposed_[s], drain);
    found = std::max(found, before + micro_batches * (f + b) + drain);
    before += f;
  }
  return found;
}

// Write K_i into warm_up_: what the layout asks for, or as many as memory holds, if these are fewer. Return false where
// some stage holds none.
inline bool Evaluator::set_warm_up(const Layout& layout, int64_t micro_batches) {
  const int stages = layout.stages();
  warm_up_.resize(stages);
  const double most = static_cast<double>(micro_batches), period = std::max(least_period(layout), 1e-300);
  double wanted = 1;
  for (int s = stages - 1; s >= 0; --s) {
    const int ahead = p_.slope == kAnySlope ? layout.ahead[s] : p_.slope;
    if (s + 1 < stages) wanted += ahead < 0 ? (forward_[s] + backward_[s] - 2 * ahead * send_[s]) / period : ahead;
    wanted = std::min(wanted, most);
    warm_up_[s] = static_cast<int>(std::ceil(wanted * (1 - 1e-9)));
  }
  for (int s = 0; s < stages; ++s) {
    int64_t k = warm_up_[s];
    const double room = room_[s] * (1 + 1e-12) - work_[s];
    if (room < k * stash_[s]) k = room > 0 ? static_cast<int64_t>(room / stash_[s]) : 0;
    if (s) k = std::min<int64_t>(k, warm_up_[s - 1]);
    if (k < 1) return false;
    warm_up_[s] = static_cast<int>(k);
  }
  return true;
}

// Return the end of a step in which each stage runs K_i forwards, then one backward and one forward in turn. This needs
// no events, only loops: K_i never grows from a stage to the next one, so backward m of all stages can be computed
// before forward m + K_i of any. `period`: the mean time between two backwards in the steady phase is written there.
inline double Evaluator::recurrence(const std::vector<int>& warm_up, int64_t micro_batches, double ceiling,
                                    double* period) {
  const int stages = static_cast<int>(warm_up.size());
  now_.assign(stages, 0), free_forward_.assign(stages, 0), free_backward_.assign(stages, 0);
  arrival_.resize(stages * micro_batches);
  std::fill(arrival_.begin(), arrival_.begin() + micro_batches, 0.0);
  const int64_t settled = this->settled(), later = kPeriods * settled;
  double before = 0;
  for (int64_t m = 0; m < micro_batches; ++m) {
    for (int s = 0; s < stages; ++s) {
      const int64_t last = std::min<int64_t>(m + warm_up[s], micro_batches);
      for (int64_t x = m ? m + warm_up[s] - 1 : 0; x < last; ++x) {
        now_[s] = std::max(now_[s], arrival_[s * micro_batches + x]) + forward_[s];
        if (s + 1 < stages) {
          free_forward_[s] = std::max(now_[s], free_forward_[s]) + send_[s];
          arrival_[(s + 1) * micro_batches + x] = free_forward_[s];
        }
      }
    }
    double arrived = 0;
    for (int s = stages - 1; s >= 0; --s) {
      now_[s] = std::max(now_[s], arrived) + backward_[s];
      const double left = (micro_batches - 1 - m) * backward_[s] +
                          std::max<int64_t>(0, micro_batches - m - warm_up[s]) * forward_[s];
      if (now_[s] + left + exposed_[s] >= ceiling) return kInfinity;
      if (s) {
        free_backward_[s - 1] = std::max(now_[s], free_backward_[s - 1]) + send_[s - 1];
        arrived = free_backward_[s - 1];
      }
    }
    if (m == settled) before = now_[0];
    if (m == later && period) *period = (now_[0] - before) / (later - settled);
  }
  double end = 0;
  for (int s = 0; s < stages; ++s) end = std::max(end, now_[s] + exposed_[s]);
  return end;
}

// The order of 1F1B with these K_i; `early_backward_order` of dapple_tf/simulator/order.py is the same in Python.
inline const Order& Evaluator::early_backward(const std::vector<int>& warm_up, int64_t micro_batches) {
  const int stages = static_cast<int>(warm_up.size());
  order_.workers = order_.stages = stages;
  order_.micro_batches = micro_batches, order_.length = 2 * micro_batches, order_.settled = settled();
  order_.simple = true;
  order_.actions.resize(stages * order_.length), order_.worker_of.resize(stages);
  for (int s = 0; s < stages; ++s) {
    order_.worker_of[s] = s;
    int64_t* entry = &order_.actions[s * order_.length];
    for (int64_t m = 0; m < warm_up[s]; ++m) *entry++ = encode(s, kForward, m);
    for (int64_t m = 0; m < micro_batches; ++m) {
      *entry++ = encode(s, kBackward, m);
      if (warm_up[s] + m < micro_batches) *entry++ = encode(s, kForward, warm_up[s] + m);
    }
  }
  return order_;
}

// The order of interleaved 1F1B; `interleaved_order` of dapple_tf/simulator/order.py is the same in Python. The order
// that was made last is kept.
inline const Order& Evaluator::interleaved(int workers, int chunks, int64_t micro_batches) {
  if (orders_workers_ == workers && orders_chunks_ == chunks && orders_micro_batches_ == micro_batches)
    return interleaved_;
  orders_workers_ = workers, orders_chunks_ = chunks, orders_micro_batches_ = micro_batches;
  // Micro-batches in groups that pass through all chunks together.
  const int64_t count = std::max<int64_t>(1, micro_batches / workers), calls = chunks * micro_batches;
  std::vector<int64_t> forwards, backwards;  // of worker 0
  int64_t largest = 0;
  for (int64_t group = 0; group < count; ++group) {
    const int64_t begin = micro_batches * group / count, end = micro_batches * (group + 1) / count;
    largest = std::max(largest, end - begin);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t m = begin; m < end; ++m) {
        forwards.push_back(encode(chunk * workers, kForward, m));
        backwards.push_back(encode((chunks - 1 - chunk) * workers, kBackward, m));
      }
    }
  }
  Order& order = interleaved_;
  order.workers = workers, order.stages = workers * chunks, order.micro_batches = micro_batches;
  order.length = 2 * calls, order.simple = true;
  order.actions.resize(workers * order.length), order.worker_of.resize(order.stages);
  for (int s = 0; s < order.stages; ++s) order.worker_of[s] = s % workers;
  for (int w = 0; w < workers; ++w) {
    const int64_t ahead = std::min<int64_t>(2 * (workers - w - 1) + (chunks - 1) * largest + 1, calls);
    const int64_t own = int64_t{w} << kStageShift;
    int64_t* entry = &order.actions[w * order.length];
    for (int64_t i = 0; i < ahead; ++i) *entry++ = forwards[i] + own;
    for (int64_t i = 0; i < calls; ++i) {
      *entry++ = backwards[i] + own;
      if (ahead + i < calls) *entry++ = forwards[ahead + i] + own;
    }
  }
  return order;
}

// Return the bytes that the workers lack for the stashes that they hold at once, of the device with most rows of each.
inline double Evaluator::interleaved_lacking(const Layout& layout, const Order& order) const {
  double lacking = 0;
  for (int w = 0; w < order.workers; ++w) {
    double held = 0, peak = 0, work = 0;
    for (int s = w; s < layout.stages(); s += layout.workers) work = std::max(work, work_[s]);
    for (int64_t i = 0; i < order.length; ++i) {
      const int64_t code = order.actions[w * order.length + i];
      if (code == kNone) break;
      held += kind_of(code) == kForward ? stash_[stage_of(code)] : -stash_[stage_of(code)];
      peak = std::max(peak, held);
    }
    lacking += std::max(0.0, (peak + work - room_[w] * (1 + 1e-12)) * most_rows_[w]);
  }
  return lacking;
}

// The least seconds of a micro-batch in a steady phase of the stages that `compute_costs` saw last: those of the
// busiest worker, boundary or interface. (Before the steady phase stages may take less from one micro-batch to the
// next, while micro-batches gather before the slowest stage.)
inline double Evaluator::least_period(const Layout& layout) const {
  double found = 0;
  for (int w = 0; w < layout.workers; ++w) {
    double busy = 0;
    for (int s = w; s < layout.stages(); s += layout.workers) {
      busy += forward_[s] + backward_[s];
      found = std::max(found, send_[s]);
    }
    found = std::max(found, busy);
  }
  for (const double moving : moving_) found = std::max(found, moving);
  return found;
}

// The number of a micro-batch: when its backward runs, the steady phase has begun. For the K_i in warm_up_.
inline int64_t Evaluator::settled() const { return std::max<int64_t>(2 * warm_up_.size() + 2, warm_up_[0] + 2); }

// How many micro-batches to simulate where the rest of the steady phase is extrapolated: all, if there are few.
inline int64_t Evaluator::shorter(const Layout& layout, int64_t micro_batches) const {
  if (layout.chunks == 1)
    return micro_batches > (kPeriods + 2) * settled() ? kPeriods * settled() + 1 : micro_batches;
  const int64_t w = layout.workers, part = 4 * w + micro_batches % w;
  return micro_batches > 6 * w + micro_batches % w && micro_batches % w <= 4 ? part : micro_batches;
}

inline double Evaluator::run(const Order& order, const Flows* flows, double ceiling) {
  Seconds seconds;
  seconds.forward = forward_.data(), seconds.backward = backward_.data(), seconds.weights = nullptr;
  seconds.send_forward = seconds.send_backward = send_.data();
  return engine_.run(order, seconds, flows, rings_, ceiling);
}

inline Step Evaluator::alone(const Layout& layout, double ceiling, bool exact) {
  Step found;
  const int stages = layout.stages();
  found.work = stages + static_cast<int64_t>(layout.owner.size());
  const double lacking = compute_costs(layout);
  if (lacking > 0) {
    found.seconds = kUnfit * (1 + std::min(lacking / p_.memory[0], 1e6));
    return found;
  }
  const int64_t all = p_.micro_batches[layout.size];
  if (layout.chunks > 1) {
    const int64_t m = exact ? all : shorter(layout, all);
    const double period = least_period(layout);
    if (period * all >= ceiling) return found;
    const Order& order = interleaved(layout.workers, layout.chunks, m);
    const double more = interleaved_lacking(layout, order);
    if (more > 0) {
      found.seconds = kUnfit * (1 + std::min(more / p_.memory[0], 1e6));
      return found;
    }
    double end = run(order, nullptr, ceiling - (all - m) * period);
    found.work += 4 * engine_.done();
    if (m < all && end < kInfinity) {
      const double before = run(interleaved(layout.workers, layout.chunks, m - layout.workers), nullptr, kInfinity);
      found.work += 4 * engine_.done();
      end += (all - m) * std::max(period, (end - before) / layout.workers);
    }
    found.fits = true;
    if (end < ceiling) found.seconds = end;
    return found;
  }
  if (p_.slope > kMostSlope) {  // GPipe: all M micro-batches must fit, since its K_i cannot be less
    double lacked = 0;
    for (int s = 0; s < stages; ++s)
      lacked += std::max(0.0, (all * stash_[s] + work_[s] - room_[s] * (1 + 1e-12)) * most_rows_[s]);
    if (lacked > 0) {
      found.seconds = kUnfit * (1 + std::min(lacked / p_.memory[0], 1e6));
      return found;
    }
  }
  if (bound(stages, all) >= ceiling || !set_warm_up(layout, all)) return found;
  const int64_t m = exact ? all : shorter(layout, all);
  const double least = least_period(layout);
  double period = 0;
  double end = recurrence(warm_up_, m, ceiling - (all - m) * least, &period);
  found.work += 2 * stages * m;
  if (m < all) end += (all - m) * std::max(period, least);
  // With contention no step is shorter than the busiest interface needs.
  end = std::max(end, all * *std::max_element(moving_.begin(), moving_.end()));
  found.fits = true;
  if (end < ceiling) found.seconds = end;
  return found;
}

// Return an estimate of the step, without the time of each action: the largest of three times. The pipeline fills, one
// stage computes its micro-batches one after the other, and the pipeline drains. The interface of a server moves all
// that its stages exchange with stages on other servers. A stage waits for gradients where it holds too few
// micro-batches in flight (Little's law). Layouts with several stages per device are simulated without contention
// instead.
inline Step Evaluator::estimate(const Layout& layout, double ceiling) {
  if (layout.chunks > 1) return alone(layout, ceiling, false);
  Step found;
  const int stages = layout.stages();
  found.work = stages + static_cast<int64_t>(layout.owner.size());
  const double lacking = compute_costs(layout);
  const int64_t m = p_.micro_batches[layout.size];
  if (lacking > 0) {
    found.seconds = kUnfit * (1 + std::min(lacking / p_.memory[0], 1e6));
    return found;
  }
  if (!set_warm_up(layout, m)) return found;
  double seconds = std::max(bound(stages, m), m * least_period(layout)), stay = 0;
  for (int s = stages - 1; s >= 0; --s) {
    stay += forward_[s] + backward_[s] + (s + 1 < stages ? 2 * send_[s] : 0);
    seconds = std::max(seconds, stay * m / warm_up_[s] + exposed_[s]);
  }
  found.fits = true;
  if (seconds < ceiling) found.seconds = seconds;
  return found;
}

// The flows of the stages that `compute_costs` saw last; `find_flows` of dapple_tf/simulator/contention.py is the same
// in Python.
inline const Flows& Evaluator::flows(const Layout& layout) {
  const int stages = layout.stages(), workers = layout.workers, every = 2 * p_.servers;
  loads_.resize(3 * stages);
  for (auto& load : loads_) load.clear();
  flows_.latency.assign(3 * stages, 0);
  if (static_cast<int>(direction_count_.size()) != every) {
    direction_count_.assign(every, 0), direction_most_.assign(every, 0), direction_index_.assign(every, -1);
  }
  std::vector<int> used;
  const auto add = [&](int flow, int direction, double demand) {
    loads_[flow].push_back({direction, demand});
    if (direction_count_[direction]++ == 0) used.push_back(direction);
    direction_most_[direction] = std::max(direction_most_[direction], demand);
  };
  const auto add_transfer = [&](int flow, int from, int to) {
    double alone = 0;
    transfer(from, to, &flows_.latency[flow], &alone);
    std::sort(transfer_.touched.begin(), transfer_.touched.end());
    transfer_.touched.erase(std::unique(transfer_.touched.begin(), transfer_.touched.end()), transfer_.touched.end());
    for (const int server : transfer_.touched) {
      if (transfer_.leaving[server] > 0) add(flow, 2 * server, transfer_.leaving[server] * p_.interface_ / alone);
      if (transfer_.entering[server] > 0) add(flow, 2 * server + 1, transfer_.entering[server] * p_.interface_ / alone);
    }
  };
  for (int s = 0; s < stages; ++s) {
    const int w = s % workers, r = offsets_[w + 1] - offsets_[w];
    double per_byte = 0;
    ring(w, &flows_.latency[2 * stages + s], &per_byte);
    std::vector<int> seen;
    for (int i = 0; i < r && r > 1; ++i) {
      const int a = p_.server[devices_[offsets_[w] + i]], b = p_.server[devices_[offsets_[w] + (i + 1) % r]];
      if (a == b || (p_.own_links && p_.own[a * p_.servers + b] > 0)) continue;
      for (const int direction : {2 * a, 2 * b + 1}) {
        if (std::find(seen.begin(), seen.end(), direction) != seen.end()) continue;
        seen.push_back(direction);
        add(2 * stages + s, direction, 2.0 * (r - 1) / r * p_.interface_ / per_byte);
      }
    }
    if (s + 1 < stages && workers > 1) {
      const int next = (s + 1) % workers;
      add_transfer(s, w, next);
      add_transfer(stages + s, next, w);
    }
  }
  flows_.directions = 0;
  for (const int direction : used) {
    // In the other directions all flows can move at once as fast as alone, so they are left out.
    const int users = direction_count_[direction];
    direction_index_[direction] = users > 1 && users * direction_most_[direction] > 1 ? flows_.directions++ : -1;
  }
  users_.resize(flows_.directions);
  for (auto& user : users_) user.clear();
  flows_.uses.resize(3 * stages), flows_.near.resize(3 * stages);
  for (int flow = 0; flow < 3 * stages; ++flow) {
    flows_.uses[flow].clear(), flows_.near[flow].clear();
    for (const Load& load : loads_[flow]) {
      if (direction_index_[load.direction] < 0) continue;
      flows_.uses[flow].push_back({direction_index_[load.direction], load.demand});
      users_[direction_index_[load.direction]].push_back(flow);
    }
  }
  scratch_.assign(3 * stages, -1);
  for (int flow = 0; flow < 3 * stages; ++flow) {
    scratch_[flow] = flow;
    for (const auto& use : flows_.uses[flow])
      for (const int other : users_[use.direction])
        if (scratch_[other] != flow) scratch_[other] = flow, flows_.near[flow].push_back(other);
  }
  for (const int direction : used) direction_count_[direction] = 0, direction_most_[direction] = 0;
  return flows_;
}

inline Step Evaluator::shared(const Layout& layout, const Step& step, double ceiling, bool exact) {
  if (step.seconds >= ceiling || !step.fits) return step;
  const Flows& shared_flows = flows(layout);
  Step found = step;
  found.work += 10 * static_cast<int64_t>(layout.owner.size());
  if (shared_flows.directions == 0) return found;
  const int64_t all = p_.micro_batches[layout.size], m = exact ? all : shorter(layout, all);
  const auto order_of = [&](int64_t count) -> const Order& {
    return layout.chunks > 1 ? interleaved(layout.workers, layout.chunks, count) : early_backward(warm_up_, count);
  };
  const double period = least_period(layout);
  double end = run(order_of(m), &shared_flows, ceiling - (all - m) * period);
  found.work += 25 * engine_.done();
  if (m < all && end < kInfinity) {
    if (layout.chunks > 1) {
      const double before = run(order_of(m - layout.workers), &shared_flows, kInfinity);
      found.work += 25 * engine_.done();
      end += (all - m) * std::max(period, (end - before) / layout.workers);
    } else {
      end += (all - m) * std::max(engine_.steady_period(), period);
    }
  }
  found.seconds = end < ceiling ? end : kInfinity;
  return found;
}

inline double Evaluator::with_warm_up(const Layout& layout, const std::vector<int>& warm_up) {
  for (size_t s = 0; s < warm_up.size(); ++s)
    if (room_[s] * (1 + 1e-12) - work_[s] < warm_up[s] * stash_[s]) return kInfinity;
  const int64_t all = p_.micro_batches[layout.size];
  const Flows* shared_flows = nullptr;
  if (p_.contention && flows(layout).directions) shared_flows = &flows_;
  if (!shared_flows) return recurrence(warm_up, all, kInfinity, nullptr);
  return run(early_backward(warm_up, all), shared_flows, kInfinity);
}

}  // namespace dapple
