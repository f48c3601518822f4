// Random moves that change a layout.
#pragma once

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

}  // namespace dapple
