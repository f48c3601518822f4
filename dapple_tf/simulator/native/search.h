// Simulated annealing over layouts by random moves, within a given amount of work.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <tuple>

#include "costs.h"

namespace dapple {

struct Random {
  uint64_t state;
  int draw(int below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<int>((state >> 11) % static_cast<uint64_t>(below));
  }
  double uniform() { return draw(1 << 30) / static_cast<double>(1 << 30); }
};

class Moves {
 public:
  Moves(const Problem& problem, const std::vector<double>& work, const double* speed)
      : p_(problem), work_(work), speed_(speed) {}
  // Change the layout by one random move; return false if the result is not worth simulating.
  bool at_random(Layout& l, Random& random) const;
  void even_cuts(Layout& l, int first, int last) const;
  static int count(const Layout& l, int w) { return static_cast<int>(std::count(l.owner.begin(), l.owner.end(), w)); }
  bool assign(Layout& l, int first, int last, bool scatter) const;

 private:
  double work(const Layout& l, int s) const { return work_[l.starts[s + 1]] - work_[l.starts[s]]; }
  static bool shift_cut(Layout& l, int boundary, int blocks);
  static int draw_shift(Random& random);
  int draw_devices(const Layout& l, int source, int target, Random& random) const;
  bool give(Layout& l, int source, int target, int wanted, Random& random) const;
  bool spread(Layout& l, int source, int target, int wanted) const;
  bool take_last(Layout& l, int source, int target, int wanted) const;
  bool split(Layout& l, int w, Random& random) const;
  void merge(Layout& l, int w, bool drop) const;
  bool relieve(Layout& l, Random& random) const;
  bool slide(Layout& l, Random& random) const;
  std::vector<double> busy_workers(const Layout& l) const;
  void rescale(Layout& l, int size, Random& random) const;
  bool swap_servers(Layout& l, Random& random) const;
  bool gather(Layout& l, int w, Random& random) const;
  bool cut_again(Layout& l, Random& random) const;
  bool change_chunks(Layout& l, Random& random) const;
  bool change_ahead(Layout& l, Random& random) const;
  int server_and_kind(int device) const { return p_.server[device] * p_.kinds + p_.kind[device]; }
  // Speeds of devices, relative to those of the first kind.
  double speed(int device) const { return speed_[p_.kind[device]]; }

  const Problem& p_;
  const std::vector<double>& work_;  // [blocks + 1] seconds of a row on a device of the first kind, sums
 public:
  const double* speed_ = nullptr;  // [kinds]
};

// Move a cut by as many blocks as its neighbours leave room for; return whether it has moved.
inline bool Moves::shift_cut(Layout& l, int boundary, int blocks) {
  const int start = l.starts[boundary];
  l.starts[boundary] = std::min(std::max(start + blocks, l.starts[boundary - 1] + 1), l.starts[boundary + 1] - 1);
  return l.starts[boundary] != start;
}

inline int Moves::draw_shift(Random& random) {
  int blocks = 1;
  while (blocks < 64 && random.draw(2)) ++blocks;
  return random.draw(2) ? blocks : -blocks;
}

// How many devices to move: one, any number, or just enough of them that the busiest device of the target computes
// fewer rows, or as many as the source can lose at once. 32 rows take as long on 31 devices as on 16, so other numbers
// often change nothing.
inline int Moves::draw_devices(const Layout& l, int source, int target, Random& random) const {
  const int kind = random.draw(4), w = kind < 2 || source == kIdleDevice ? target : source;
  const int have = w == kIdleDevice ? 0 : count(l, w);
  if (kind == 3 || have == 0) return random.draw(3) ? 1 : 1 + random.draw(std::max(1, p_.devices / 2));
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t rows = p_.size[l.size], busiest = up(rows, have);
  if (w == target) {
    if (busiest == 1) return 1;
    return static_cast<int>(up(rows, random.draw(2) ? busiest - busiest / 2 : busiest - 1) - have);
  }
  const int64_t enough = up(rows, busiest);
  return static_cast<int>(have - (enough < have ? enough : up(rows, busiest + 1)));
}

// Move devices from one worker to another: a random one of the source, and those that follow it in the device order,
// beginning with devices of the same kind on its server. The source keeps at least one device.
inline bool Moves::give(Layout& l, int source, int target, int wanted, Random& random) const {
  const int have = count(l, source), devices = static_cast<int>(l.owner.size());
  wanted = std::min(wanted, source == kIdleDevice ? have : have - 1);
  if (wanted < 1 || source == target) return false;
  int skip = random.draw(have), first = 0;
  while (l.owner[first] != source || skip-- > 0) ++first;
  const int home = server_and_kind(l.device_at[first]);
  for (const bool same : {true, false}) {
    for (int k = 0; k < devices && wanted; ++k) {
      const int i = (first + k) % devices;
      if (l.owner[i] == source && (server_and_kind(l.device_at[i]) == home || !same)) l.owner[i] = target, --wanted;
    }
  }
  return true;
}

// Move devices that are evenly spaced among those of the source.
inline bool Moves::spread(Layout& l, int source, int target, int wanted) const {
  const int have = count(l, source);
  if (wanted <= 0 || wanted >= have) return false;
  int seen = 0, moved = 0;
  for (int& owner : l.owner) {
    if (owner != source) continue;
    ++seen;
    if (moved < wanted * seen / have) owner = target, ++moved;
  }
  return true;
}

// Move the last devices of the source.
inline bool Moves::take_last(Layout& l, int source, int target, int wanted) const {
  if (wanted <= 0 || wanted >= count(l, source)) return false;
  for (int i = static_cast<int>(l.owner.size()) - 1; i >= 0 && wanted; --i)
    if (l.owner[i] == source) l.owner[i] = target, --wanted;
  return true;
}

// Assign the devices of the workers `first` to `last` again, as many to each as before: one worker after the other, or
// with `scatter` evenly mixed. Worker W stands for the idle devices.
inline bool Moves::assign(Layout& l, int first, int last, bool scatter) const {
  std::vector<int> wanted(last + 1 - first, 0), given(last + 1 - first, 0);
  const auto index = [&](int owner) { return owner == kIdleDevice ? l.workers : owner; };
  int total = 0, seen = 0, chosen = 0;
  for (const int owner : l.owner)
    if (index(owner) >= first && index(owner) <= last) ++wanted[index(owner) - first], ++total;
  bool changed = false;
  for (int& owner : l.owner) {
    if (index(owner) < first || index(owner) > last) continue;
    ++seen;
    if (scatter) {
      chosen = -1;
      int most = 0;
      for (int k = 0; k < static_cast<int>(wanted.size()); ++k) {
        const int lacking = wanted[k] * seen - given[k] * total;
        if (given[k] < wanted[k] && (chosen < 0 || lacking > most)) chosen = k, most = lacking;
      }
    } else {
      while (given[chosen] == wanted[chosen]) ++chosen;
    }
    ++given[chosen];
    changed = changed || index(owner) != first + chosen;
    owner = first + chosen == l.workers ? kIdleDevice : first + chosen;
  }
  return changed;
}

// Cut the stages `first` to `last` again, each with work in proportion to the speed of its worker's devices.
inline void Moves::even_cuts(Layout& l, int first, int last) const {
  std::vector<double> speeds(l.workers, 0);
  for (size_t i = 0; i < l.owner.size(); ++i)
    if (l.owner[i] >= 0) speeds[l.owner[i]] += speed(l.device_at[i]);
  double total = 0, before = 0;
  for (int s = first; s <= last; ++s) total += speeds[s % l.workers];
  const int begin = l.starts[first], end = l.starts[last + 1];
  const double whole = work_[end] - work_[begin];
  int block = begin;
  for (int s = first; s < last; ++s) {
    before += speeds[s % l.workers];
    const double wanted = work_[begin] + whole * before / std::max(total, 1e-300);
    const int most = end - (last - s);
    block = std::max(block, l.starts[s] + 1);
    while (block < most && work_[block] < wanted) ++block;
    if (block - 1 > l.starts[s] && wanted - work_[block - 1] < work_[block] - wanted) --block;
    l.starts[s + 1] = std::min(block, most);
  }
}

// Split a worker in two: its stage is cut in two, or there are more stages under several stages per worker. The new
// worker gets idle devices or some of the old one.
inline bool Moves::split(Layout& l, int w, Random& random) const {
  const int have = count(l, w), idle = count(l, kIdleDevice), stages = l.stages();
  if (have < 2 && idle < 1) return false;
  if (stages + l.chunks >= static_cast<int>(l.starts.size()) || stages + l.chunks > p_.blocks) return false;
  if (l.chunks == 1 && l.starts[w + 1] - l.starts[w] < 2) return false;
  for (int& owner : l.owner)
    if (owner > w) ++owner;
  if (l.chunks > 1) {
    l.starts[stages + l.chunks] = l.starts[stages];
    ++l.workers;
  } else {
    const int first = l.starts[w], end = l.starts[w + 1];
    for (int s = stages; s > w; --s)
      l.starts[s + 1] = l.starts[s], l.recompute[s] = l.recompute[s - 1], l.ahead[s] = l.ahead[s - 1];
    l.starts[w + 1] = first + 1 + random.draw(end - first - 1);
    ++l.workers;
  }
  bool done;
  if (idle && (have < 2 || random.draw(2))) {
    done = give(l, kIdleDevice, w + 1, 1 + random.draw(idle), random);
  } else {
    int wanted = have / 2;
    if (l.chunks == 1) {
      const double own = work(l, w), whole = own + work(l, w + 1);
      wanted = have - static_cast<int>(whole > 0 ? have * own / whole + random.uniform() : have / 2);
    }
    if (random.draw(4) == 0) wanted = 1 + random.draw(have - 1);
    wanted = std::min(std::max(wanted, 1), have - 1);
    done = random.draw(2) ? spread(l, w, w + 1, wanted) : take_last(l, w, w + 1, wanted);
  }
  if (l.chunks > 1) even_cuts(l, 0, l.stages() - 1);
  return done;
}

// Merge worker w and the next one. `drop`: the devices of the next one become idle.
inline void Moves::merge(Layout& l, int w, bool drop) const {
  const int stages = l.stages();
  for (int& owner : l.owner) {
    if (owner == w + 1 && drop) {
      owner = kIdleDevice;
    } else if (owner > w) {
      --owner;
    }
  }
  if (l.chunks > 1) {
    if (--l.workers == 1) l.chunks = 1;  // stages that follow one another on the same devices are one stage
    l.starts[l.stages()] = l.starts[stages];
    // Cuts that were beyond the last stage's begin are set again.
    for (int s = 0; s < l.stages(); ++s) l.starts[s] = std::min(l.starts[s], l.starts[l.stages()] - (l.stages() - s));
    even_cuts(l, 0, l.stages() - 1);
    return;
  }
  for (int s = w + 1; s < stages; ++s) {
    l.starts[s] = l.starts[s + 1];
    if (s + 1 < stages) l.recompute[s] = l.recompute[s + 1], l.ahead[s] = l.ahead[s + 1];
  }
  --l.workers;
}

// The work of each worker over the speed of its devices.
inline std::vector<double> Moves::busy_workers(const Layout& l) const {
  std::vector<double> busy(l.workers, 0), speeds(l.workers, 0);
  for (size_t i = 0; i < l.owner.size(); ++i)
    if (l.owner[i] >= 0) speeds[l.owner[i]] += speed(l.device_at[i]);
  for (int s = 0; s < l.stages(); ++s) busy[s % l.workers] += work(l, s) / std::max(speeds[s % l.workers], 1e-300);
  return busy;
}

// Take blocks from one stage, mostly of the busiest worker, and give as many to another one. The stages between them
// keep their number of blocks.
inline bool Moves::slide(Layout& l, Random& random) const {
  const int stages = l.stages();
  int from = random.draw(stages), to = random.draw(stages);
  if (random.draw(4)) {
    const std::vector<double> busy = busy_workers(l);
    const int busiest = static_cast<int>(std::max_element(busy.begin(), busy.end()) - busy.begin());
    from = busiest + l.workers * random.draw(l.chunks);
  }
  if (from == to) return false;
  int blocks = 1;
  while (blocks < 16 && random.draw(3) == 0) ++blocks;
  if (l.starts[from + 1] - l.starts[from] <= blocks) return false;
  for (int boundary = std::min(from, to) + 1; boundary <= std::max(from, to); ++boundary)
    l.starts[boundary] += from < to ? -blocks : blocks;
  return true;
}

// Give the busiest worker devices: of another worker, idle ones, or those that merging two other workers sets free.
inline bool Moves::relieve(Layout& l, Random& random) const {
  if (l.workers < 2) return false;
  const std::vector<double> busy = busy_workers(l);
  int busiest = static_cast<int>(std::max_element(busy.begin(), busy.end()) - busy.begin());
  if (random.draw(2)) {
    const int a = random.draw(l.workers - 1);
    if (busiest == a || busiest == a + 1) return false;
    const int fewer = std::min(count(l, a), count(l, a + 1));
    merge(l, a, false);
    if (busiest > a) --busiest;
    return give(l, a, busiest, random.draw(2) ? fewer : 1 + random.draw(std::max(1, fewer)), random);
  }
  int source = random.draw(l.workers);
  if (random.draw(4) == 0) source = kIdleDevice;
  if (!give(l, source, busiest, draw_devices(l, source, busiest, random), random)) return false;
  if (source != kIdleDevice && random.draw(3) == 0) {
    if (l.chunks > 1) {
      even_cuts(l, 0, l.stages() - 1);
    } else {
      even_cuts(l, std::min(source, busiest), std::max(source, busiest));
    }
  }
  return true;
}

// Take another micro-batch size. Merge workers at random if it is larger; if it is smaller, split workers that have too
// many devices for it.
inline void Moves::rescale(Layout& l, int size, Random& random) const {
  const bool grows = size > l.size;
  l.size = size;
  const int most = static_cast<int>(std::min<int64_t>(p_.size[size] / p_.least_rows, 1 << 30));
  if (grows) {
    for (int w = l.workers - 2; w >= 0; --w)
      if (random.draw(2) && count(l, w) + count(l, w + 1) <= most) merge(l, w, false);
  } else {
    for (int w = l.workers - 1; w >= 0; --w)
      while (count(l, w) > most && split(l, w, random)) {
      }
    for (int w = 0; w < l.workers; ++w) give(l, w, kIdleDevice, count(l, w) - most, random);
  }
  if (random.draw(2)) even_cuts(l, 0, l.stages() - 1);
}

// Swap the owners of the devices of two servers, one device after the other (devices of one kind, if there are
// several).
inline bool Moves::swap_servers(Layout& l, Random& random) const {
  const int devices = static_cast<int>(l.owner.size());
  const int a = server_and_kind(l.device_at[random.draw(devices)]);
  const int b = server_and_kind(l.device_at[random.draw(devices)]);
  if (a == b) return false;
  int j = 0;
  bool changed = false;
  for (int i = 0; i < devices; ++i) {
    if (server_and_kind(l.device_at[i]) != a) continue;
    while (j < devices && server_and_kind(l.device_at[j]) != b) ++j;
    if (j == devices) break;
    changed = changed || l.owner[i] != l.owner[j];
    std::swap(l.owner[i], l.owner[j++]);
  }
  return changed;
}

// Swap devices so that a worker has more of them on one of its servers.
inline bool Moves::gather(Layout& l, int w, Random& random) const {
  const int devices = static_cast<int>(l.owner.size()), have = count(l, w);
  if (!have) return false;
  int skip = random.draw(have), i = 0, j = 0;
  while (l.owner[i] != w || skip-- > 0) ++i;
  const int home = server_and_kind(l.device_at[i]);
  bool changed = false;
  for (i = 0; i < devices; ++i) {
    if (l.owner[i] != w || server_and_kind(l.device_at[i]) == home) continue;
    while (j < devices && (server_and_kind(l.device_at[j]) != home || l.owner[j] == w)) ++j;
    if (j == devices) break;
    std::swap(l.owner[i], l.owner[j]);
    changed = true;
  }
  return changed;
}

// Cut all stages evenly, or those between two random ones.
inline bool Moves::cut_again(Layout& l, Random& random) const {
  int a = random.draw(l.stages()), b = random.draw(l.stages());
  if (random.draw(2)) a = 0, b = l.stages() - 1;
  even_cuts(l, std::min(a, b), std::max(a, b));
  return true;
}

// Take another number of stages per worker, and cut evenly.
inline bool Moves::change_chunks(Layout& l, Random& random) const {
  if (p_.most_chunks < 2) return false;
  const int chunks = 1 + random.draw(p_.most_chunks), blocks = l.starts[l.stages()];
  const int stages = chunks * l.workers;
  if (chunks == l.chunks || !p_.may_have[chunks]) return false;
  if (stages >= static_cast<int>(l.starts.size()) || stages > blocks) return false;
  if (chunks > 1 && l.workers < 2) return false;
  l.chunks = chunks;
  for (int s = 0; s < stages; ++s) l.starts[s] = s, l.recompute[s] = 0;
  l.starts[stages] = blocks;
  even_cuts(l, 0, stages - 1);
  return true;
}

// Change `Layout::ahead` of one stage or of all.
inline bool Moves::change_ahead(Layout& l, Random& random) const {
  const int stages = l.stages(), ahead = random.draw(kMostSlope + 1), needed = -1 - random.draw(4);
  if (p_.slope != kAnySlope || l.chunks > 1 || stages < 2) return false;
  if (random.draw(3) == 0) {
    std::fill(l.ahead.begin(), l.ahead.end(), random.draw(2) ? std::max(ahead, 1) : needed);
  } else {
    l.ahead[random.draw(stages - 1)] = random.draw(4) ? ahead : random.draw(2) ? kAllAhead : needed;
  }
  return true;
}

inline bool Moves::at_random(Layout& l, Random& random) const {
  const int stages = l.stages(), workers = l.workers, devices = static_cast<int>(l.owner.size());
  const int kind = random.draw(100), w = random.draw(workers), s = random.draw(stages);
  const auto any_cut = [&] { return stages > 1 && shift_cut(l, 1 + random.draw(stages - 1), draw_shift(random)); };
  if (kind < 18) return random.draw(3) ? any_cut() : slide(l, random);
  if (kind < 36) {  // give devices to another worker, often a neighbour, and often move the cuts accordingly
    int source = w, target = random.draw(workers);
    if (random.draw(2)) target = random.draw(2) ? w + 1 : w - 1;
    if (random.draw(4) == 0) source = kIdleDevice, target = w;
    if (target < 0 || target >= workers) return false;
    if (!give(l, source, target, draw_devices(l, source, target, random), random)) return false;
    const int follow = random.draw(3);
    if (source == kIdleDevice || follow == 0) {
      if (random.draw(2)) any_cut();
    } else if (l.chunks > 1) {
      even_cuts(l, 0, stages - 1);
    } else if (follow == 1) {
      even_cuts(l, std::min(source, target), std::max(source, target));
    } else {  // the target gets a block more: every cut between the two workers moves by a block
      for (int boundary = std::min(source, target) + 1; boundary <= std::max(source, target); ++boundary)
        shift_cut(l, boundary, source < target ? -1 : 1);
    }
    return true;
  }
  if (kind < 46) return relieve(l, random);
  if (kind < 51) {
    if (random.draw(4) == 0) return swap_servers(l, random);
    if (random.draw(3) == 0) return gather(l, w, random);
    const int i = random.draw(devices), j = random.draw(devices);
    const bool apart = server_and_kind(l.device_at[i]) != server_and_kind(l.device_at[j]);
    if (random.draw(2)) {
      const bool used = l.owner[i] >= 0 || l.owner[j] >= 0;
      std::swap(l.device_at[i], l.device_at[j]);
      return apart && used;
    }
    const bool differ = l.owner[i] != l.owner[j];
    std::swap(l.owner[i], l.owner[j]);
    return apart && differ;
  }
  if (kind < 54) {
    int a = w, b = random.draw(workers);
    if (random.draw(2)) a = 0, b = workers - 1;
    if (random.draw(4) == 0) {
      if (l.chunks > 1) {
        even_cuts(l, 0, stages - 1);
      } else {
        even_cuts(l, std::min(a, b), std::max(a, b));
      }
    }
    return assign(l, std::min(a, b), std::max(a, b), random.draw(2) == 0);
  }
  if (kind < 62) return split(l, w, random) && (random.draw(3) > 0 || cut_again(l, random));
  if (kind < 70) {
    if (workers < 2) return false;
    merge(l, random.draw(workers - 1), random.draw(8) == 0);
    return random.draw(3) > 0 || cut_again(l, random);
  }
  if (kind < 72) return change_chunks(l, random);
  if (kind < 76) return change_ahead(l, random);
  if (kind < 80) {
    if (p_.sizes < 2) return false;
    const int z = random.draw(4) ? l.size + (random.draw(2) ? 1 : -1) : random.draw(p_.sizes);
    if (z < 0 || z >= p_.sizes || z == l.size) return false;
    if (random.draw(2)) rescale(l, z, random);
    l.size = z;
    if (random.draw(3) == 0) even_cuts(l, 0, l.stages() - 1);
    return true;
  }
  if (kind < 84) {
    const int other = random.draw(workers);
    for (int& owner : l.owner) owner = owner == w ? other : owner == other ? w : owner;
    if (random.draw(2)) {
      if (l.chunks > 1) {
        even_cuts(l, 0, stages - 1);
      } else {
        even_cuts(l, std::min(w, other), std::max(w, other));
      }
    }
    return w != other;
  }
  if (kind < 88) return give(l, w, kIdleDevice, 1 + (random.draw(4) == 0 ? random.draw(devices) : 0), random);
  if (kind < 92) {
    const int other = random.draw(stages);
    even_cuts(l, std::min(s, other), std::max(s, other));
    return s != other;
  }
  if (!p_.may_recompute) return change_ahead(l, random) || any_cut();
  l.recompute[s] = !l.recompute[s];
  return true;
}

// A layout that the search improves, and its step.
struct Run {
  Layout layout;
  double seconds = kInfinity;
};

// Makes starting layouts and improves layouts. The result does not depend on the number of threads, since each run has
// its own seed.
class Search {
 public:
  Search(const Problem& problem, const std::vector<double>& work, const double* speed, int threads,
         const volatile uint8_t* stop)
      : p_(problem), work_(work), speed_(speed), moves_(problem, work, speed), threads_(threads), stop_(stop) {}
  // Which devices workers have: any; those that follow each other in the device order; or evenly mixed ones.
  enum Rule { kFree = 0, kInOrder = 1, kScattered = 2 };
  // How a layout is measured: by an estimate, or simulated without or with contention.
  enum Model { kEstimate, kAlone, kShared };
  // Improve layouts, each with an equal part of the work; return them, the fastest first. `first`, `last`:
  // temperatures.
  std::vector<Run> anneal(std::vector<Run> runs, int64_t work, double first, double last, Model model, Rule rule,
                          uint64_t seed) const;
  std::vector<Run> starts() const;
  std::vector<Run> planned_starts() const;
  void descend(std::vector<Run>& runs, int64_t work, bool contention) const;
  void rank(std::vector<Run>& runs, bool contention) const;
  const Moves& moves() const { return moves_; }
  // Call the function with each number below `count`; none is called once `stop` is set.
  void each(size_t count, const std::function<void(size_t, Evaluator&)>& function) const;

 private:
  int server_and_kind(int device) const { return p_.server[device] * p_.kinds + p_.kind[device]; }
  Layout empty(int z, int workers, int chunks) const;
  using Pools = std::vector<std::vector<int>>;  // lists of devices; a stage takes consecutive devices of one of them
  std::vector<Pools> pools() const;
  std::vector<Run> plan_stages(const std::vector<int>& cuts, const Pools& pools, int z) const;
  void anneal_one(Run& run, Evaluator& evaluator, int64_t work, double first, double last, Model model, Rule rule,
                  uint64_t seed) const;
  const Problem& p_;
  const std::vector<double>& work_;  // [blocks + 1] seconds of a row on a device of the first kind, sums
  const double* speed_;              // [kinds] relative to the first kind
  Moves moves_;
  int threads_;
  const volatile uint8_t* stop_;
};

// Call the function for 0, 1 ... count - 1, in several threads.
inline void Search::each(size_t count, const std::function<void(size_t, Evaluator&)>& function) const {
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failing;
  const auto take = [&] {
    try {
      Evaluator evaluator(p_);
      for (size_t i = next++; i < count && !*stop_; i = next++) function(i, evaluator);
    } catch (...) {  // such as a lack of memory; it would end the process if it left a thread
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int t = 1; t < threads_ && t < static_cast<int>(count); ++t) others.emplace_back(take);
  } catch (const std::system_error&) {  // the system allows no more threads: these do the work
  }
  take();
  for (auto& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

inline void Search::anneal_one(Run& run, Evaluator& evaluator, int64_t work, double first, double last, Model model,
                               Rule rule, uint64_t seed) const {
  const bool contention = model == kShared;
  const auto measure = [&](const Layout& l, double ceiling) {
    return model == kEstimate ? evaluator.estimate(l, ceiling) : evaluator.alone(l, ceiling, false);
  };
  // With contention a step is estimated as the step without it, times the factor of the layout that was simulated last.
  constexpr int kMostEstimates = 3;  // moves in a row that are accepted by this estimate
  Random random{seed * 2654435761u + 88172645463325252u};
  const auto apply_rule = [&](Layout& l) {
    if (rule != kFree) moves_.assign(l, 0, l.workers, rule == kScattered);
  };
  apply_rule(run.layout);
  Layout now = run.layout, trial = now;
  Step alone = measure(now, kInfinity);
  Step step = contention ? evaluator.shared(now, alone, kInfinity, false) : alone;
  const auto ratio = [](double shared, double own) { return own > 0 && own < kUnfit ? shared / own : 1.0; };
  double seconds = step.seconds, slower = ratio(step.seconds, alone.seconds), least = seconds;
  int estimates = 0;
  const int64_t each_move = 100 + 2 * static_cast<int64_t>(now.owner.size());
  for (int64_t left = work; left > 0 && !*stop_;) {
    trial = now;
    left -= each_move + 12 * now.stages();
    if (!moves_.at_random(trial, random) || (p_.workers && trial.workers != p_.workers)) continue;
    apply_rule(trial);
    const double temperature = first * std::pow(last / first, 1 - static_cast<double>(left) / work);
    const double ceiling = seconds * (1 - temperature * std::log(random.uniform() + 1e-12));
    step = measure(trial, ceiling);
    left -= step.work;
    if (step.seconds >= ceiling) continue;
    if (contention && step.fits) {
      const double estimate = step.seconds * slower;
      if (estimates < kMostEstimates && least * (1 - 1e-12) < estimate && estimate < ceiling) {
        seconds = estimate, ++estimates;
        now = trial;
        continue;
      }
      alone = step;
      step = evaluator.shared(trial, alone, ceiling, false);
      left -= step.work - alone.work;
      if (step.seconds >= ceiling) continue;
      slower = ratio(step.seconds, alone.seconds), estimates = 0;
    }
    seconds = step.seconds;
    now = trial;
    if (seconds < least * (1 - 1e-12)) least = seconds, run.layout = now;
  }
  run.seconds = least;
}

inline std::vector<Run> Search::anneal(std::vector<Run> runs, int64_t work, double first, double last, Model model,
                                       Rule rule, uint64_t seed) const {
  const int64_t each_work = runs.empty() ? 0 : work / static_cast<int64_t>(runs.size());
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    anneal_one(runs[i], evaluator, each_work, first, last, model, rule, seed * 1000 + i + 1);
  });
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
  return runs;
}

// Give each layout the warm-up with which its step is shortest, and sort them. To save time, other warm-ups are tried
// only of layouts that are not far slower than the fastest one, and far slower layouts with several stages per worker
// are left out.
inline void Search::rank(std::vector<Run>& runs, bool contention) const {
  constexpr double kFar = 1.5;
  const auto measure = [&](Evaluator& evaluator, const Layout& l, double ceiling) {
    const Step alone = evaluator.alone(l, ceiling, false);
    return contention ? evaluator.shared(l, alone, ceiling, false).seconds : alone.seconds;
  };
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    runs[i].seconds = runs[i].layout.chunks == 1 ? measure(evaluator, runs[i].layout, kInfinity) : kInfinity;
  });
  double least = kInfinity;
  for (const Run& run : runs) least = std::min(least, run.seconds);
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    Run& run = runs[i];
    Layout trial = run.layout;
    if (trial.chunks > 1) run.seconds = measure(evaluator, trial, kFar * least);
    for (const int ahead : {1, -1, -2, -4}) {
      if (p_.slope != kAnySlope || trial.stages() == 1 || trial.chunks > 1 || run.seconds > kFar * least) break;
      std::fill(trial.ahead.begin(), trial.ahead.end(), ahead);
      const double seconds = measure(evaluator, trial, run.seconds);
      if (seconds < run.seconds * (1 - 1e-9)) run.layout = trial, run.seconds = seconds;
    }
  });
  const auto left_out = [](const Run& run) { return run.seconds == kInfinity; };
  runs.erase(std::remove_if(runs.begin(), runs.end(), left_out), runs.end());
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
}

// Improve layouts until none of these changes helps: moving a cut, alone or together with the cuts after it, by one
// block or two; giving one device to another worker; and taking the K_i of one slope for all stages.
inline void Search::descend(std::vector<Run>& runs, int64_t work, bool contention) const {
  const int64_t each_work = runs.empty() ? 0 : work / static_cast<int64_t>(runs.size());
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    Layout& best = runs[i].layout;
    int64_t left = each_work;
    const auto measure = [&](const Layout& l, double ceiling) {
      const Step alone = evaluator.alone(l, ceiling, false);
      left -= 100 + alone.work;
      if (!contention || alone.seconds >= ceiling) return alone.seconds;
      const Step step = evaluator.shared(l, alone, ceiling, false);
      left -= step.work - alone.work;
      return step.seconds;
    };
    double seconds = measure(best, kInfinity);
    const auto attempt = [&](const Layout& trial) {
      const double found = measure(trial, seconds * (1 - 1e-9));
      if (found >= seconds * (1 - 1e-9)) return false;
      best = trial, seconds = found;
      return true;
    };
    for (bool changed = true; changed && left > 0 && !*stop_;) {
      changed = false;
      for (int boundary = 1; boundary < best.stages(); ++boundary) {
        for (const int blocks : {1, -1, 2, -2}) {
          for (int other = boundary; other < best.stages() && left > 0; ++other) {
            Layout trial = best;  // the cuts from `boundary` to `other` move together
            bool moved = true;
            const int step = blocks > 0 ? -1 : 1;
            for (int b = blocks > 0 ? other : boundary; moved && b >= boundary && b <= other; b += step) {
              trial.starts[b] += blocks;
              moved = trial.starts[b] > trial.starts[b - 1] && trial.starts[b] < trial.starts[b + 1];
            }
            changed = (moved && attempt(trial)) || changed;
          }
        }
      }
      for (int d = 0; d < p_.devices && left > 0; ++d) {
        // Of neighbours in the device order that are alike only the first one is moved.
        const auto alike = [&](int a, int b) {
          return server_and_kind(best.device_at[a]) == server_and_kind(best.device_at[b]);
        };
        if (d && best.owner[d] == best.owner[d - 1] && alike(d, d - 1)) continue;
        for (int w = kIdleDevice; w < best.workers && left > 0; ++w) {
          if (w == best.owner[d] || (best.owner[d] >= 0 && Moves::count(best, best.owner[d]) == 1)) continue;
          Layout trial = best;
          trial.owner[d] = w;
          changed = attempt(trial) || changed;
        }
      }
      for (int slope = 1; slope <= kMostSlope && p_.slope == kAnySlope && best.chunks == 1 && left > 0; ++slope) {
        Layout trial = best;
        std::fill(trial.ahead.begin(), trial.ahead.end(), slope);
        changed = (trial.ahead != best.ahead && attempt(trial)) || changed;
      }
    }
    runs[i].seconds = seconds;
  });
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
}

// A layout without devices and cuts.
inline Layout Search::empty(int z, int workers, int chunks) const {
  Layout l;
  const int room = std::min(p_.blocks, std::min(p_.devices, p_.blocks) * p_.most_chunks) + 1;
  l.size = z, l.workers = workers, l.chunks = chunks;
  l.starts.assign(room, 0), l.recompute.assign(room, 0), l.ahead.assign(room, 2);
  l.owner.resize(p_.devices), l.device_at.resize(p_.devices);
  for (int d = 0; d < p_.devices; ++d) l.device_at[d] = d;
  l.starts[l.stages()] = p_.blocks;
  return l;
}

// Return the pools to plan stages with. Most of them are a single list of all devices: as given; one device of each of
// several servers in turn; the last server first; by falling and by rising speed, where equally fast devices are as
// given or one of each server in turn. The last ones are a list for each kind of devices.
inline std::vector<Search::Pools> Search::pools() const {
  std::vector<int> given(p_.devices);
  for (int d = 0; d < p_.devices; ++d) given[d] = d;
  std::vector<Pools> found{{given}};
  // All that the costs of stages on devices in this order depend on. Orders with equal patterns are tried once. Servers
  // have numbers in the order in which they come, unless some pair of servers has its own link.
  const auto pattern = [&](const std::vector<int>& order) {
    std::vector<int> number(p_.servers, -1);
    std::vector<std::tuple<int, int, double, double>> devices;
    int next = 0;
    for (const int d : order) {
      const int x = p_.server[d];
      if (number[x] < 0) number[x] = p_.own_links ? x : next++;
      devices.push_back({p_.kind[d], number[x], p_.inside[x], p_.inside_latency[x]});
    }
    return devices;
  };
  const auto add = [&](auto less) {
    std::vector<int> order = given;
    std::stable_sort(order.begin(), order.end(), less);
    const auto alike = [&](const Pools& other) { return pattern(other[0]) == pattern(order); };
    if (std::none_of(found.begin(), found.end(), alike)) found.push_back({order});
  };
  std::vector<int> local(p_.devices), seen(p_.servers, 0);  // local: the number of a device within its server
  for (int d = 0; d < p_.devices; ++d) local[d] = seen[p_.server[d]]++;
  // As many servers take turns as `together` says; only all of them on many devices, where planning takes seconds.
  for (int together = p_.servers; together > 1; together /= p_.devices > 128 ? p_.servers : 2) {
    const auto set = [&](int d) { return p_.server[d] / together; };
    add([&](int a, int b) { return std::pair(set(a), local[a]) < std::pair(set(b), local[b]); });
  }
  add([&](int a, int b) { return p_.server[a] > p_.server[b]; });
  if (p_.kinds > 1) {
    const auto speed = [&](int d) { return speed_[p_.kind[d]]; };
    add([&](int a, int b) { return speed(a) > speed(b); });
    add([&](int a, int b) { return speed(a) < speed(b); });
    add([&](int a, int b) { return std::pair(-speed(a), local[a]) < std::pair(-speed(b), local[b]); });
    add([&](int a, int b) { return std::pair(speed(a), local[a]) < std::pair(speed(b), local[b]); });
    found.emplace_back(p_.kinds);
    for (int d = 0; d < p_.devices; ++d) found.back()[p_.kind[d]].push_back(d);
  }
  return found;
}

// Return starting layouts: even pipelines of many numbers of workers, with one stage per worker and with several; and
// pipelines of two stages, with many numbers of devices for the second one and many cuts. Such layouts differ so much
// from each other that moves rarely lead from one to another.
inline std::vector<Run> Search::starts() const {
  std::vector<Run> runs;
  const int most = std::min(p_.devices, p_.blocks);
  const auto grow = [&](int count) { return count < 8 || p_.workers ? count + 1 : count * 5 / 4; };
  // No worker has more devices than a micro-batch has rows.
  const auto drop_surplus = [&](Layout& l) {
    std::vector<int> have(l.workers, 0);
    for (int& owner : l.owner)
      if (int64_t{++have[owner]} * p_.least_rows > p_.size[l.size]) owner = kIdleDevice;
  };
  for (int workers = 1;; workers = std::min(most, grow(workers))) {
    for (int chunks = 1; chunks <= (workers > 1 ? p_.most_chunks : 1); ++chunks) {
      if (!p_.may_have[chunks] || workers * chunks > p_.blocks || (p_.workers && workers != p_.workers)) continue;
      for (const bool scatter : {false, true}) {
        if (scatter && (p_.servers == 1 || p_.servers == p_.devices || workers == 1)) continue;
        for (int z = 0; z < p_.sizes; ++z) {
          Layout l = empty(z, workers, chunks);
          for (int d = 0; d < p_.devices; ++d) l.owner[d] = static_cast<int>(int64_t{d} * workers / p_.devices);
          drop_surplus(l);
          if (scatter) moves_.assign(l, 0, workers - 1, true);
          for (int s = 0; s < l.stages(); ++s) l.starts[s] = s;
          moves_.even_cuts(l, 0, l.stages() - 1);
          runs.push_back({l, kInfinity});
        }
      }
    }
    if (workers == most) break;
  }
  if (p_.workers && p_.workers != 2) return runs;
  const int cuts = std::max(8, std::min(64, 4096 / p_.devices)), step = 1 + p_.devices / 128;
  for (int last = 1; last < p_.devices; last = grow(last)) {
    for (int cut = 1; cut < p_.blocks; cut += std::max(1, p_.blocks / cuts)) {
      for (int z = 0; z < p_.sizes; z += step) {
        Layout l = empty(z, 2, 1);
        for (int d = 0; d < p_.devices; ++d) l.owner[d] = d >= p_.devices - last;
        drop_surplus(l);
        l.starts[1] = cut;
        runs.push_back({l, kInfinity});
      }
    }
  }
  return runs;
}

// Return starting layouts whose stages are found by dynamic programming, for all pools and micro-batch sizes. A limit
// on the seconds of a stage is given (Alpa, section 5.2, equation 3). Each stage has consecutive devices of a pool. Of
// all stages within the limit those are taken whose forwards, backwards and transfers together take the fewest seconds.
// There are four variants:
//
// 1. The seconds of the AllReduces are added too (`rings`).
// 2. They are not added.
// 3. As 1, and the limit also holds for each transfer, and for all that a server's interface moves of one micro-batch
//    (`sends`).
// 4. As 3, and later stages are shorter (`tapers`): the seconds of a stage for all micro-batches, plus those of the
//    stages before it to fill and to drain the pipeline, are at most M times the limit.
//
// Rows, rings, interfaces and memory are only estimated here. The layouts are evaluated like any others afterwards.
inline std::vector<Run> Search::planned_starts() const {
  const int most_cuts = p_.devices > 32 ? 64 : 128;  // with more, planning the stages takes longer than the search
  // Cuts with nearly equal work between them, or all cuts if there are few blocks.
  std::vector<int> cuts{0};
  const double work = work_[p_.blocks];
  for (int block = 1; block < p_.blocks; ++block) {
    const bool far = work_[block] - work_[cuts.back()] >= work / most_cuts * 0.9;
    if (p_.blocks <= most_cuts || far || work <= 0) cuts.push_back(block);
  }
  cuts.push_back(p_.blocks);
  std::vector<std::pair<Pools, int>> tasks;
  for (const auto& some : pools())
    for (int z = 0; z < p_.sizes; z += 1 + p_.sizes / 16) tasks.push_back({some, z});
  std::vector<std::vector<Run>> found(tasks.size());
  each(tasks.size(), [&](size_t i, Evaluator&) { found[i] = plan_stages(cuts, tasks[i].first, tasks[i].second); });
  std::vector<Run> runs;
  for (const auto& some : found) runs.insert(runs.end(), some.begin(), some.end());
  return runs;
}

// Return the planned stages of some pools and one micro-batch size. The limit rises until longer stages cannot make a
// shorter step. A state says how many units of each pool are used. A unit is one device or, where there are many
// devices, several consecutive ones of a pool.
inline std::vector<Run> Search::plan_stages(const std::vector<int>& cuts, const Pools& pools, int z) const {
  constexpr int kMostStates = 300;  // of several pools; units get larger until there are no more
  constexpr int kMostUnits = 64;    // of all pools
  constexpr int kFineCells = 3000, kCoarseCells = 10000;  // cuts times states, up to which limits rise by 2% and by 4%
  constexpr double kWorse = 1.5;  // no limit is tried with which M - 1 micro-batches take more than 1.5 best steps
  constexpr double kRise = 1.1;   // the factor by which a limit rises where it need not rise in small steps
  constexpr double kRecomputed = 4.0 / 3;  // a second forward, if backward takes twice as long as forward
  const int n = static_cast<int>(cuts.size()) - 1, count = static_cast<int>(pools.size());
  const double rows = static_cast<double>(p_.size[z]), m = static_cast<double>(p_.micro_batches[z]);
  const double scale = rows / p_.batch;
  int unit = (p_.devices + kMostUnits - 1) / kMostUnits, states = 0;
  std::vector<int> units(count), strides(count);
  for (;; ++unit) {
    states = 1;
    for (int k = 0; k < count; ++k) {
      strides[k] = states, units[k] = static_cast<int>(pools[k].size()) / unit;
      states *= units[k] + 1;
    }
    if (count == 1 || states <= kMostStates) break;
  }
  const auto link = [&](int x, int y) {  // seconds per byte
    const bool own = p_.own_links && x != y && p_.own[x * p_.servers + y] > 0;
    return own ? p_.own[x * p_.servers + y] : x == y ? p_.inside[x] : p_.interface_;
  };
  // How many units of pool k are used.
  const auto taken = [&](int state, int k) { return state / strides[k] % (units[k] + 1); };
  // The devices that a stage can have: `units` of a pool, from the unit `begin` on; and what its costs depend on.
  struct Span {
    int pool, begin, units;
    double seconds;             // of a micro-batch on its busiest device, for each second of `work_`
    double stash, fixed, ring;  // bytes of its busiest device, and seconds of its ring, for each byte
    double memory;              // bytes of its smallest device
  };
  std::vector<Span> spans;
  std::vector<std::vector<std::vector<int>>> beginning(count);  // the spans that begin with each unit of each pool
  double all_speed = 0;
  for (int k = 0; k < count; ++k) {
    const auto& order = pools[k];
    const auto server = [&](int d) { return d < units[k] * unit ? p_.server[order[d]] : -1; };
    beginning[k].resize(units[k] + 1);
    for (const int d : order) all_speed += speed_[p_.kind[d]];
    for (int a = 0; a < units[k]; ++a) {
      double least_memory = kInfinity, speed = 0, rows_before = kInfinity, slowest = 0;
      int seen = a * unit;
      for (int size = 1; a + size <= units[k]; ++size) {
        const double r = static_cast<double>(size) * unit, most_rows = std::ceil(rows / r);
        if (r * p_.least_rows > rows) break;
        for (; seen < (a + size) * unit; ++seen) {
          least_memory = std::min(least_memory, p_.memory[p_.kind[order[seen]]]), speed += speed_[p_.kind[order[seen]]];
          if (seen > a * unit) slowest = std::max(slowest, link(server(seen - 1), server(seen)));
        }
        // Of equal devices a number is tried only if the busiest one gets clearly fewer rows than with the number
        // before; of unequal ones all numbers up to 8, then only some.
        const bool alike = p_.kinds == 1 && p_.whole_rows;
        if (alike ? most_rows > 0.95 * rows_before : size > 8 && size % (size / 4) != 0) continue;
        rows_before = most_rows;
        // The rows of a micro-batch over those of the busiest device, or the speed of all devices.
        const double divided = p_.kinds > 1 ? speed : p_.whole_rows ? rows / most_rows : r;
        const int x = server(a * unit), y = server((a + size) * unit - 1);
        const double ring = 2 * (r - 1) / r * std::max(slowest, link(y, x));
        beginning[k][a].push_back(static_cast<int>(spans.size()));
        spans.push_back({k, a, size, rows / divided, scale / divided, p_.fixed_factor + p_.shared_factor / r, ring,
                          least_memory});
      }
    }
  }
  std::vector<double> work(n + 1), bytes(n + 1), stash(n + 1);  // sums up to each cut
  std::vector<double> sent(n + 1);  // bytes that cross each cut
  for (int i = 0; i <= n; ++i) {
    work[i] = work_[cuts[i]], bytes[i] = p_.parameters[cuts[i]], stash[i] = p_.stash[cuts[i]];
    sent[i] = p_.boundary[cuts[i]] * scale;
  }
  // The transfer from one span to one that can follow it, which is measured when it is first needed. The first device
  // of each unit stands for all of them.
  struct Sending {
    double latency = kNever, per_byte = 0;
    bool by_interface = false;    // whether it uses network interfaces
    bool on_same_server = false;  // whether some server has devices of both spans
  };
  std::vector<std::vector<Sending>> sendings(spans.size());
  Transfer transfer({p_.servers, p_.inside, p_.inside_latency, p_.interface_, p_.interface_latency, p_.own,
                     p_.own_latency, p_.own_links != 0});
  const auto servers_of = [&](const Span& span) {  // in the order in which they get rows
    std::vector<int> found;
    for (int i = 0; i < span.units; ++i) found.push_back(p_.server[pools[span.pool][(span.begin + i) * unit]]);
    std::sort(found.begin(), found.end());
    return found;
  };
  const auto cut_rows = [&](int parts) {
    std::vector<int64_t> found;
    for (int i = 0; i <= parts; ++i) found.push_back(p_.whole_rows && unit == 1 ? p_.size[z] * i / parts : i);
    return found;
  };
  const auto sending = [&](int from, int to) -> const Sending& {
    const Span &sender = spans[from], &receiver = spans[to];
    // From one pool only the spans that begin where the sender ends can follow.
    const std::vector<int>& next = beginning[0][count == 1 ? sender.begin + sender.units : 0];
    std::vector<Sending>& of_sender = sendings[from];
    if (of_sender.empty()) of_sender.resize(count == 1 ? next.size() : spans.size());
    Sending& found = of_sender[count == 1 ? to - next.front() : to];
    if (!std::isnan(found.latency)) return found;
    const std::vector<int> senders = servers_of(sender), receivers = servers_of(receiver);
    transfer.measure(sender.units, [&](int i) { return senders[i]; }, cut_rows(sender.units).data(), receiver.units,
                     [&](int i) { return receivers[i]; }, cut_rows(receiver.units).data());
    std::vector<int> common;
    std::set_intersection(senders.begin(), senders.end(), receivers.begin(), receivers.end(),
                          std::back_inserter(common));
    return found = {transfer.latency, transfer.per_byte, !transfer.touched.empty(), !common.empty()};
  };
  std::vector<Run> runs;
  std::vector<double> best((n + 1) * states);
  // Seconds in which the interfaces of the last stage's servers move their part of a micro-batch, one way.
  std::vector<double> moving((n + 1) * states);
  std::vector<int> from_cut((n + 1) * states), from_span((n + 1) * states), from_state((n + 1) * states);
  std::vector<uint8_t> recompute((n + 1) * states);
  double whole = 0;  // the seconds of all stages together in the last solution
  const auto solve = [&](double limit, bool rings, bool sends, bool tapers) {
    std::fill(best.begin(), best.end(), kInfinity);
    best[0] = 0;
    for (int i = 0; i < n; ++i) {
      if (!p_.splittable[cuts[i]] && p_.kinds > 1) continue;
      for (int state = 0; state < states; ++state) {
        const double before = best[i * states + state];
        if (before == kInfinity) continue;
        const int from = from_span[i * states + state];
        const double moving_before = i && p_.contention ? moving[i * states + state] : 0;
        for (int k = 0; k < count; ++k) {
          for (const int to_span : beginning[k][taken(state, k)]) {
            const Span& span = spans[to_span];
            double in = 0, moving_here = 0;
            if (i) {
              const Sending& sent_here = sending(from, to_span);
              in = sent_here.latency + sent[i] * sent_here.per_byte;
              const double by_interface = sent_here.by_interface ? in : 0;
              // The same interface moves what enters the stage before and what leaves it.
              if (sends && (in > limit || (by_interface > 0 && moving_before + in > limit))) continue;
              moving_here = by_interface + (sent_here.on_same_server ? moving_before : 0);
            }
            const double own = tapers ? limit - (before + 2 * in) / m : limit;
            // The micro-batches that the stage computes before the first one comes back.
            const double in_flight = std::min(m, std::max(1.0, std::ceil((whole - before) / limit)));
            const double inputs = sent[i] * span.stash / scale;
            const int to_state = state + span.units * strides[k];
            for (int j = i + 1; j <= n; ++j) {
              const double seconds = (work[j] - work[i]) * span.seconds, parameters = bytes[j] - bytes[i];
              const double ring = span.ring * parameters;
              const double room = span.memory - parameters * span.fixed, held = (stash[j] - stash[i]) * span.stash;
              const bool again = p_.may_recompute && held * in_flight > room;
              if (again ? held + inputs * in_flight > room : held > room && !p_.recompute_all) break;
              const double all_seconds = again ? seconds * kRecomputed : seconds;
              if (all_seconds + ring / m > own) break;
              const double found = before + all_seconds + 2 * in + (rings ? ring : 0);
              const int to = j * states + to_state;
              if (found >= best[to]) continue;
              best[to] = found, moving[to] = moving_here, recompute[to] = again;
              from_cut[to] = i, from_span[to] = to_span, from_state[to] = state;
            }
          }
        }
      }
    }
    const auto end = std::min_element(best.begin() + n * states, best.end());
    if (*end < kInfinity) whole = *end;
    return *end < kInfinity ? static_cast<int>(end - best.begin()) - n * states : -1;
  };
  double least = kInfinity;  // the least estimated step of all stages so far
  const auto add_stages_within = [&](double limit, bool rings, bool sends, bool tapers) {
    const int end = solve(limit, rings, sends, tapers);
    if (end < 0) return;
    if (tapers) {
      least = std::min(least, m * limit);
    } else if (rings || p_.devices == 1) {
      least = std::min(least, best[n * states + end] + (m - 1) * limit);
    }
    std::vector<int> entries;  // the table's entries of the stages, the last stage first
    for (int entry = n * states + end; entry > 0; entry = from_cut[entry] * states + from_state[entry])
      entries.push_back(entry);
    const int found = static_cast<int>(entries.size());
    if ((p_.workers && found != p_.workers) || found > std::min(p_.devices, p_.blocks)) return;
    Layout l = empty(z, found, 1);
    std::vector<uint8_t> used(p_.devices, 0);
    int at = 0;
    for (int s = 0; s < found; ++s) {
      const int entry = entries[found - 1 - s];
      const Span& span = spans[from_span[entry]];
      const auto first = pools[span.pool].begin() + span.begin * unit;
      std::vector<int> own(first, first + span.units * unit);
      std::sort(own.begin(), own.end());  // so that the devices of a server get consecutive rows
      l.starts[s] = cuts[from_cut[entry]], l.recompute[s] = recompute[entry];
      for (const int d : own) l.device_at[at] = d, l.owner[at++] = s, used[d] = 1;
    }
    for (const auto& order : pools)
      for (const int d : order)
        if (!used[d]) l.device_at[at] = d, l.owner[at++] = kIdleDevice;
    runs.push_back({l, kInfinity});
  };
  const double equal_share = work_[p_.blocks] * rows / std::max(all_speed, 1e-300), most = 2.0 * p_.devices;
  const int cells = n * states;
  const double fine = m >= 16 && cells <= kFineCells ? 1.02 : cells <= kCoarseCells ? 1.04 : 1.1;
  for (const auto& [rings, sends, tapers] :
       {std::tuple{true, false, false}, {false, false, false}, {true, true, false}, {true, true, true}}) {
    if (rings && p_.devices == 1) continue;
    whole = 0;
    double first = 1;  // nearly the least limit within which there are stages, as a multiple of `equal_share`
    while (first <= most && solve(equal_share * first, rings, sends, tapers) < 0) first *= kRise;
    first = std::max(1.0, first / kRise);
    for (double factor = first; factor <= most && (m - 1) * equal_share * factor <= least * kWorse;) {
      add_stages_within(equal_share * factor, rings, sends, tapers);
      factor *= factor < 1.4 * first ? fine : factor < 2 * first ? kRise : 1.4;
    }
  }
  return runs;
}

}  // namespace dapple
