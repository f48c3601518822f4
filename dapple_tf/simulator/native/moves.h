// Random moves that change a layout.
#pragma once

#include "costs.h"

namespace dapple {

// Marsaglia's xorshift generator.
struct Random {
  uint64_t state;
  // Return a whole number from 0 to below - 1.
  int draw(int below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<int>((state >> 11) % static_cast<uint64_t>(below));
  }
  double uniform() { return draw(1 << 30) / static_cast<double>(1 << 30); }
};

class Moves {
 public:
  Moves(const Problem& problem, const std::vector<double>& row_seconds, const double* speed)
      : p_(problem), row_seconds_(row_seconds), speed_(speed) {}
  // Change the layout by one random move; return false if the result is not worth simulating.
  bool apply_random(Layout& l, Random& random) const;
  void balance_cuts(Layout& l, int first, int last) const;
  // Return the number of devices of worker w, or of idle devices.
  static int count(const Layout& l, int w) { return static_cast<int>(std::count(l.owner.begin(), l.owner.end(), w)); }
  bool reassign(Layout& l, int first, int last, bool interleave) const;

  // Return a number that devices of the same server and the same kind share.
  int server_and_kind(int device) const { return p_.server[device] * p_.kinds + p_.kind[device]; }

 private:
  // Return the seconds of a row on stage s.
  double row_seconds(const Layout& l, int s) const { return row_seconds_[l.starts[s + 1]] - row_seconds_[l.starts[s]]; }
  static bool shift_cut(Layout& l, int boundary, int blocks);
  static int draw_shift(Random& random);
  int draw_devices(const Layout& l, int source, int target, Random& random) const;
  bool give(Layout& l, int source, int target, int wanted, Random& random) const;
  bool take_spread(Layout& l, int source, int target, int wanted) const;
  bool take_last(Layout& l, int source, int target, int wanted) const;
  bool split(Layout& l, int w, Random& random) const;
  void merge(Layout& l, int w, bool idle_next) const;
  bool relieve_busiest(Layout& l, Random& random) const;
  bool slide(Layout& l, Random& random) const;
  std::vector<double> worker_seconds(const Layout& l) const;
  void rescale(Layout& l, int size, Random& random) const;
  bool swap_servers(Layout& l, Random& random) const;
  bool gather(Layout& l, int w, Random& random) const;
  bool balance_some_cuts(Layout& l, Random& random) const;
  bool change_chunks(Layout& l, Random& random) const;
  bool change_ahead(Layout& l, Random& random) const;
  // Return one number for the server and the kind of a device; equal numbers mean that devices are interchangeable.
  // Return the speed of a device relative to the first kind.
  double speed(int device) const { return speed_[p_.kind[device]]; }

  const Problem& p_;
  const std::vector<double>& row_seconds_;  // [blocks + 1] prefix sums: seconds of a row on a device of the first kind
  const double* speed_;                     // [kinds] relative to the first kind
};

// Move a cut by `blocks`, or less far, so that each stage keeps a block. Return whether it has moved.
inline bool Moves::shift_cut(Layout& l, int boundary, int blocks) {
  const int start = l.starts[boundary];
  l.starts[boundary] = std::min(std::max(start + blocks, l.starts[boundary - 1] + 1), l.starts[boundary + 1] - 1);
  return l.starts[boundary] != start;
}

// Return by how many blocks to move a cut: mostly by one or two, to either side.
inline int Moves::draw_shift(Random& random) {
  int blocks = 1;
  while (blocks < 64 && random.draw(2)) ++blocks;
  return random.draw(2) ? blocks : -blocks;
}

// Return how many devices to move. This is one device, or up to half of all; or just enough that the busiest device of
// the target computes fewer rows; or as many as the source can lose while its busiest device computes the same number
// of rows or, where it can lose none, one row more. Other numbers often change nothing, because rows are whole: 32 rows
// take as long on 31 devices as on 16.
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

// Move `wanted` devices from worker `source` to worker `target`: a random device of the source, then those that follow
// it in the device order, first those of the same kind on the same server. A worker keeps at least one device. Return
// whether devices were moved.
inline bool Moves::give(Layout& l, int source, int target, int wanted, Random& random) const {
  const int have = count(l, source), devices = static_cast<int>(l.owner.size());
  wanted = std::min(wanted, source == kIdleDevice ? have : have - 1);
  if (wanted < 1 || source == target) return false;
  int skip = random.draw(have), first = 0;
  while (l.owner[first] != source || skip-- > 0) ++first;
  const int group = server_and_kind(l.device_at[first]);
  for (const bool same : {true, false}) {
    for (int k = 0; k < devices && wanted; ++k) {
      const int i = (first + k) % devices;
      if (l.owner[i] == source && (server_and_kind(l.device_at[i]) == group || !same)) l.owner[i] = target, --wanted;
    }
  }
  return true;
}

// Move `wanted` devices of the source that are evenly spaced in the device order. Return whether they were moved.
inline bool Moves::take_spread(Layout& l, int source, int target, int wanted) const {
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

// Move the last `wanted` devices of the source in the device order. Return whether they were moved.
inline bool Moves::take_last(Layout& l, int source, int target, int wanted) const {
  if (wanted <= 0 || wanted >= count(l, source)) return false;
  for (int i = static_cast<int>(l.owner.size()) - 1; i >= 0 && wanted; --i)
    if (l.owner[i] == source) l.owner[i] = target, --wanted;
  return true;
}

// Deal out the devices of the workers `first` to `last` again; each worker gets as many as it had. A worker gets
// consecutive devices in the device order or, with `interleave`, the devices of the workers alternate. Worker number
// l.workers stands for the idle devices. Return whether an owner has changed.
inline bool Moves::reassign(Layout& l, int first, int last, bool interleave) const {
  std::vector<int> wanted(last + 1 - first, 0), given(last + 1 - first, 0);
  const auto index = [&](int owner) { return owner == kIdleDevice ? l.workers : owner; };
  int total = 0, seen = 0, chosen = 0;
  for (const int owner : l.owner)
    if (index(owner) >= first && index(owner) <= last) ++wanted[index(owner) - first], ++total;
  bool changed = false;
  for (int& owner : l.owner) {
    if (index(owner) < first || index(owner) > last) continue;
    ++seen;
    if (interleave) {
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

// Move the cuts between the stages `first` and `last`, so that the seconds of a row of each stage are in proportion to
// the total speed of its worker's devices.
inline void Moves::balance_cuts(Layout& l, int first, int last) const {
  std::vector<double> speeds(l.workers, 0);
  for (size_t i = 0; i < l.owner.size(); ++i)
    if (l.owner[i] >= 0) speeds[l.owner[i]] += speed(l.device_at[i]);
  double total = 0, before = 0;
  for (int s = first; s <= last; ++s) total += speeds[s % l.workers];
  const int begin = l.starts[first], end = l.starts[last + 1];
  const double whole = row_seconds_[end] - row_seconds_[begin];
  int block = begin;
  for (int s = first; s < last; ++s) {
    before += speeds[s % l.workers];
    const double wanted = row_seconds_[begin] + whole * before / std::max(total, 1e-300);
    const int most = end - (last - s);
    block = std::max(block, l.starts[s] + 1);
    while (block < most && row_seconds_[block] < wanted) ++block;
    if (block - 1 > l.starts[s] && wanted - row_seconds_[block - 1] < row_seconds_[block] - wanted) --block;
    l.starts[s + 1] = std::min(block, most);
  }
}

// Split a worker in two. With one stage per worker its stage is cut at a random block; with several, all stages are cut
// anew for one more worker. The new worker gets idle devices or some of the old worker. Return whether it got any.
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
      const double own = row_seconds(l, w), whole = own + row_seconds(l, w + 1);
      wanted = have - static_cast<int>(whole > 0 ? have * own / whole + random.uniform() : have / 2);
    }
    if (random.draw(4) == 0) wanted = 1 + random.draw(have - 1);
    wanted = std::min(std::max(wanted, 1), have - 1);
    done = random.draw(2) ? take_spread(l, w, w + 1, wanted) : take_last(l, w, w + 1, wanted);
  }
  if (l.chunks > 1) balance_cuts(l, 0, l.stages() - 1);
  return done;
}

// Merge worker w and the next one, and their stages. `idle_next`: the devices of the next one become idle.
inline void Moves::merge(Layout& l, int w, bool idle_next) const {
  const int stages = l.stages();
  for (int& owner : l.owner) {
    if (owner == w + 1 && idle_next) {
      owner = kIdleDevice;
    } else if (owner > w) {
      --owner;
    }
  }
  if (l.chunks > 1) {
    if (--l.workers == 1) l.chunks = 1;  // stages that follow one another on the same devices are one stage
    l.starts[l.stages()] = l.starts[stages];
    // Move cuts that are now too near to the end of the model, so that each stage has a block.
    for (int s = 0; s < l.stages(); ++s) l.starts[s] = std::min(l.starts[s], l.starts[l.stages()] - (l.stages() - s));
    balance_cuts(l, 0, l.stages() - 1);
    return;
  }
  for (int s = w + 1; s < stages; ++s) {
    l.starts[s] = l.starts[s + 1];
    if (s + 1 < stages) l.recompute[s] = l.recompute[s + 1], l.ahead[s] = l.ahead[s + 1];
  }
  --l.workers;
}

// Return the seconds that each worker needs for a row of its stages, if its devices share the row.
inline std::vector<double> Moves::worker_seconds(const Layout& l) const {
  std::vector<double> busy(l.workers, 0), speeds(l.workers, 0);
  for (size_t i = 0; i < l.owner.size(); ++i)
    if (l.owner[i] >= 0) speeds[l.owner[i]] += speed(l.device_at[i]);
  for (int s = 0; s < l.stages(); ++s)
    busy[s % l.workers] += row_seconds(l, s) / std::max(speeds[s % l.workers], 1e-300);
  return busy;
}

// Make a stage shorter by some blocks and another one longer by as many. Usually the shorter one is a stage of the
// busiest worker. The stages between the two keep their number of blocks. Return whether the layout has changed.
inline bool Moves::slide(Layout& l, Random& random) const {
  const int stages = l.stages();
  int from = random.draw(stages), to = random.draw(stages);
  if (random.draw(4)) {
    const std::vector<double> busy = worker_seconds(l);
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

// Give the busiest worker more devices: devices of another worker, idle devices, or some of the devices of two other
// workers that are merged. Return whether it got any.
inline bool Moves::relieve_busiest(Layout& l, Random& random) const {
  if (l.workers < 2) return false;
  const std::vector<double> busy = worker_seconds(l);
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
      balance_cuts(l, 0, l.stages() - 1);
    } else {
      balance_cuts(l, std::min(source, busiest), std::max(source, busiest));
    }
  }
  return true;
}

// Change the micro-batch size to that with index `size`, and adapt the workers. If micro-batches get larger, merge some
// workers at random. If they get smaller, split workers that have more devices than a micro-batch has rows for.
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
  if (random.draw(2)) balance_cuts(l, 0, l.stages() - 1);
}

// Swap the owners of devices in pairs: each device of a random server with one of another random server. With several
// kinds, only devices of one kind of each server. Return whether an owner has changed.
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

// Swap owners so that more devices of a worker are of one kind and on one server. Return whether an owner has changed.
inline bool Moves::gather(Layout& l, int w, Random& random) const {
  const int devices = static_cast<int>(l.owner.size()), have = count(l, w);
  if (!have) return false;
  int skip = random.draw(have), i = 0, j = 0;
  while (l.owner[i] != w || skip-- > 0) ++i;
  const int group = server_and_kind(l.device_at[i]);
  bool changed = false;
  for (i = 0; i < devices; ++i) {
    if (l.owner[i] != w || server_and_kind(l.device_at[i]) == group) continue;
    while (j < devices && (server_and_kind(l.device_at[j]) != group || l.owner[j] == w)) ++j;
    if (j == devices) break;
    std::swap(l.owner[i], l.owner[j]);
    changed = true;
  }
  return changed;
}

// Balance all cuts, or those between two random stages.
inline bool Moves::balance_some_cuts(Layout& l, Random& random) const {
  int a = random.draw(l.stages()), b = random.draw(l.stages());
  if (random.draw(2)) a = 0, b = l.stages() - 1;
  balance_cuts(l, std::min(a, b), std::max(a, b));
  return true;
}

// Change the number of stages per worker, and balance the cuts. Return whether it has changed.
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
  balance_cuts(l, 0, stages - 1);
  return true;
}

// Change `Layout::ahead` of one stage or of all. Return false if the problem or the layout leaves no choice of K_i.
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

inline bool Moves::apply_random(Layout& l, Random& random) const {
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
      balance_cuts(l, 0, stages - 1);
    } else if (follow == 1) {
      balance_cuts(l, std::min(source, target), std::max(source, target));
    } else {  // move each cut between the two workers by a block: the target gets a block, and the source loses one
      for (int boundary = std::min(source, target) + 1; boundary <= std::max(source, target); ++boundary)
        shift_cut(l, boundary, source < target ? -1 : 1);
    }
    return true;
  }
  if (kind < 46) return relieve_busiest(l, random);
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
        balance_cuts(l, 0, stages - 1);
      } else {
        balance_cuts(l, std::min(a, b), std::max(a, b));
      }
    }
    return reassign(l, std::min(a, b), std::max(a, b), random.draw(2) == 0);
  }
  if (kind < 62) return split(l, w, random) && (random.draw(3) > 0 || balance_some_cuts(l, random));
  if (kind < 70) {
    if (workers < 2) return false;
    merge(l, random.draw(workers - 1), random.draw(8) == 0);
    return random.draw(3) > 0 || balance_some_cuts(l, random);
  }
  if (kind < 72) return change_chunks(l, random);
  if (kind < 76) return change_ahead(l, random);
  if (kind < 80) {
    if (p_.sizes < 2) return false;
    const int z = random.draw(4) ? l.size + (random.draw(2) ? 1 : -1) : random.draw(p_.sizes);
    if (z < 0 || z >= p_.sizes || z == l.size) return false;
    if (random.draw(2)) rescale(l, z, random);
    l.size = z;
    if (random.draw(3) == 0) balance_cuts(l, 0, l.stages() - 1);
    return true;
  }
  if (kind < 84) {
    const int other = random.draw(workers);
    for (int& owner : l.owner) owner = owner == w ? other : owner == other ? w : owner;
    if (random.draw(2)) {
      if (l.chunks > 1) {
        balance_cuts(l, 0, stages - 1);
      } else {
        balance_cuts(l, std::min(w, other), std::max(w, other));
      }
    }
    return w != other;
  }
  if (kind < 88) return give(l, w, kIdleDevice, 1 + (random.draw(4) == 0 ? random.draw(devices) : 0), random);
  if (kind < 92) {
    const int other = random.draw(stages);
    balance_cuts(l, std::min(s, other), std::max(s, other));
    return s != other;
  }
  if (!p_.may_recompute) return change_ahead(l, random) || any_cut();
  l.recompute[s] = !l.recompute[s];
  return true;
}

}  // namespace dapple
