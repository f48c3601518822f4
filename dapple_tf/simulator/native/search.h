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
  double share() { return draw(1 << 30) / static_cast<double>(1 << 30); }
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
  int place(int device) const { return p_.server[device] * p_.kinds + p_.kind[device]; }
  double speed(int device) const { return speed_[p_.kind[device]]; }

  const Problem& p_;
  const std::vector<double>& work_;  // [blocks + 1] seconds of a row, sums
 public:
  const double* speed_ = nullptr;  // [kinds]
};

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

// Move devices: a random one of the source and those that follow it in the device order, first those of its server.
inline bool Moves::give(Layout& l, int source, int target, int wanted, Random& random) const {
  const int have = count(l, source), devices = static_cast<int>(l.owner.size());
  wanted = std::min(wanted, source == kIdleDevice ? have : have - 1);
  if (wanted < 1 || source == target) return false;
  int skip = random.draw(have), first = 0;
  while (l.owner[first] != source || skip-- > 0) ++first;
  const int home = place(l.device_at[first]);
  for (const bool same : {true, false}) {
    for (int k = 0; k < devices && wanted; ++k) {
      const int i = (first + k) % devices;
      if (l.owner[i] == source && (place(l.device_at[i]) == home || !same)) l.owner[i] = target, --wanted;
    }
  }
  return true;
}

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

inline bool Moves::take_last(Layout& l, int source, int target, int wanted) const {
  if (wanted <= 0 || wanted >= count(l, source)) return false;
  for (int i = static_cast<int>(l.owner.size()) - 1; i >= 0 && wanted; --i)
    if (l.owner[i] == source) l.owner[i] = target, --wanted;
  return true;
}

// Assign the devices of workers `first` to `last` again, as many to each as before; `last` may be W: idle devices.
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
    for (int s = stages; s > w; --s) l.starts[s + 1] = l.starts[s], l.recompute[s] = l.recompute[s - 1], l.ahead[s] = l.ahead[s - 1];
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
      wanted = have - static_cast<int>(whole > 0 ? have * own / whole + random.share() : have / 2);
    }
    if (random.draw(4) == 0) wanted = 1 + random.draw(have - 1);
    wanted = std::min(std::max(wanted, 1), have - 1);
    done = random.draw(2) ? spread(l, w, w + 1, wanted) : take_last(l, w, w + 1, wanted);
  }
  if (l.chunks > 1) even_cuts(l, 0, l.stages() - 1);
  return done;
}

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

// Take blocks from one stage, mostly of the busiest worker, and give as many to another one: the stages between them
// slide.
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
  if (!give(l, source, busiest, random.draw(3) ? 1 : 2, random)) return false;
  if (source != kIdleDevice && random.draw(3) == 0) {
    if (l.chunks > 1) {
      even_cuts(l, 0, l.stages() - 1);
    } else {
      even_cuts(l, std::min(source, busiest), std::max(source, busiest));
    }
  }
  return true;
}

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

inline bool Moves::swap_servers(Layout& l, Random& random) const {
  const int devices = static_cast<int>(l.owner.size());
  const int a = place(l.device_at[random.draw(devices)]), b = place(l.device_at[random.draw(devices)]);
  if (a == b) return false;
  int j = 0;
  bool changed = false;
  for (int i = 0; i < devices; ++i) {
    if (place(l.device_at[i]) != a) continue;
    while (j < devices && place(l.device_at[j]) != b) ++j;
    if (j == devices) break;
    changed = changed || l.owner[i] != l.owner[j];
    std::swap(l.owner[i], l.owner[j++]);
  }
  return changed;
}

inline bool Moves::gather(Layout& l, int w, Random& random) const {
  const int devices = static_cast<int>(l.owner.size()), have = count(l, w);
  if (!have) return false;
  int skip = random.draw(have), i = 0, j = 0;
  while (l.owner[i] != w || skip-- > 0) ++i;
  const int home = place(l.device_at[i]);
  bool changed = false;
  for (i = 0; i < devices; ++i) {
    if (l.owner[i] != w || place(l.device_at[i]) == home) continue;
    while (j < devices && (place(l.device_at[j]) != home || l.owner[j] == w)) ++j;
    if (j == devices) break;
    std::swap(l.owner[i], l.owner[j]);
    changed = true;
  }
  return changed;
}

inline bool Moves::cut_again(Layout& l, Random& random) const {
  int a = random.draw(l.stages()), b = random.draw(l.stages());
  if (random.draw(2)) a = 0, b = l.stages() - 1;
  even_cuts(l, std::min(a, b), std::max(a, b));
  return true;
}

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

inline bool Moves::change_ahead(Layout& l, Random& random) const {
  const int stages = l.stages(), ahead = random.draw(kMostSlope + 1);
  if (p_.slope != kAnySlope || l.chunks > 1 || stages < 2) return false;
  if (random.draw(3) == 0) {
    std::fill(l.ahead.begin(), l.ahead.end(), std::max(ahead, 1));
  } else {
    l.ahead[random.draw(stages - 1)] = random.draw(4) ? ahead : kAllAhead;
  }
  return true;
}

inline bool Moves::at_random(Layout& l, Random& random) const {
  const int stages = l.stages(), workers = l.workers, devices = static_cast<int>(l.owner.size());
  const int kind = random.draw(100), w = random.draw(workers), s = random.draw(stages);
  const auto any_cut = [&] { return stages > 1 && shift_cut(l, 1 + random.draw(stages - 1), draw_shift(random)); };
  if (kind < 18) return random.draw(3) ? any_cut() : slide(l, random);
  if (kind < 36) {  // devices to another worker, often the next one, and often with cuts that follow
    int source = w, target = random.draw(workers);
    if (random.draw(2)) target = random.draw(2) ? w + 1 : w - 1;
    if (random.draw(4) == 0) source = kIdleDevice, target = w;
    if (target < 0 || target >= workers) return false;
    if (!give(l, source, target, random.draw(3) ? 1 : 1 + random.draw(std::max(1, devices / 2)), random)) return false;
    const int follow = random.draw(3);
    if (source == kIdleDevice || follow == 0) {
      if (random.draw(2)) any_cut();
    } else if (l.chunks > 1) {
      even_cuts(l, 0, stages - 1);
    } else if (follow == 1) {
      even_cuts(l, std::min(source, target), std::max(source, target));
    } else {  // the target gets a block more: every cut between the two moves
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
    const bool apart = place(l.device_at[i]) != place(l.device_at[j]);
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

struct Run {
  Layout layout;
  double seconds = kInfinity;
};

// Improve layouts, each with an equal part of the work; return them, the fastest first. The result does not depend on
// the number of threads: each run has its own seed.
class Search {
 public:
  Search(const Problem& problem, const std::vector<double>& work, const double* speed, int threads,
         const volatile uint8_t* stop)
      : p_(problem), work_(work), speed_(speed), moves_(problem, work, speed), threads_(threads), stop_(stop) {}
  enum Rule { kFree = 0, kInOrder = 1, kScattered = 2 };
  enum Model { kEstimate, kAlone, kShared };  // how a layout is measured; shared: with contention
  std::vector<Run> anneal(std::vector<Run> runs, int64_t work, double first, double last, Model model, Rule rule,
                          uint64_t seed) const;
  std::vector<Run> starts() const;
  std::vector<Run> planned_starts() const;
  void descend(std::vector<Run>& runs, int64_t work, bool contention) const;
  void rank(std::vector<Run>& runs, bool contention) const;
  void rank_starts(std::vector<Run>& runs) const;
  const Moves& moves() const { return moves_; }
  void each(size_t count, const std::function<void(size_t, Evaluator&)>& function) const;

 private:
  int place(int device) const { return p_.server[device] * p_.kinds + p_.kind[device]; }
  Layout empty(int z, int workers, int chunks) const;
  std::vector<std::vector<int>> device_orders() const;
  std::vector<Run> plan_stages(const std::vector<int>& cuts, const std::vector<int>& order, int z) const;
  void anneal_one(Run& run, Evaluator& evaluator, int64_t work, double first, double last, Model model, Rule rule,
                  uint64_t seed) const;
  const Problem& p_;
  const std::vector<double>& work_;  // [blocks + 1] seconds of a row, sums
  const double* speed_;              // [kinds]
  Moves moves_;
  int threads_;
  const volatile uint8_t* stop_;
};

inline void Search::each(size_t count, const std::function<void(size_t, Evaluator&)>& function) const {
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failing;
  const auto take = [&] {
    try {
      Evaluator evaluator(p_);
      for (size_t i = next++; i < count; i = next++) function(i, evaluator);
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
  constexpr int kMostEstimates = 3;  // moves in a row that are accepted by an estimate of the contention
  Random random{seed * 2654435761u + 88172645463325252u};
  const auto place = [&](Layout& l) {
    if (rule != kFree) moves_.assign(l, 0, l.workers, rule == kScattered);
  };
  place(run.layout);
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
    place(trial);
    const double temperature = first * std::pow(last / first, 1 - static_cast<double>(left) / work);
    const double ceiling = seconds * (1 - temperature * std::log(random.share() + 1e-12));
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
  const int64_t share = runs.empty() ? 0 : work / static_cast<int64_t>(runs.size());
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    anneal_one(runs[i], evaluator, share, first, last, model, rule, seed * 1000 + i + 1);
  });
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
  return runs;
}

inline void Search::rank(std::vector<Run>& runs, bool contention) const {
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    const Step alone = evaluator.alone(runs[i].layout, kInfinity, false);
    runs[i].seconds = contention ? evaluator.shared(runs[i].layout, alone, kInfinity, false).seconds : alone.seconds;
  });
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
}

// Give each layout the slope under which it takes least, without contention, and sort them. What takes long is left out
// where a layout is far slower than the others: slopes other than 2, and several stages a worker.
inline void Search::rank_starts(std::vector<Run>& runs) const {
  constexpr double kFar = 1.5;
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    if (runs[i].layout.chunks == 1) runs[i].seconds = evaluator.alone(runs[i].layout, kInfinity, false).seconds;
  });
  double least = kInfinity;
  for (const Run& run : runs) least = std::min(least, run.seconds);
  const bool any_slope = p_.slope == kAnySlope;
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    Run& run = runs[i];
    Layout trial = run.layout;
    if (trial.chunks > 1) run.seconds = evaluator.alone(trial, kFar * least, false).seconds;
    for (const int slope : {1, 3, 4, 6, kMostSlope}) {
      if (!any_slope || trial.stages() == 1 || trial.chunks > 1 || run.seconds > kFar * least) break;
      std::fill(trial.ahead.begin(), trial.ahead.end(), slope);
      const double seconds = evaluator.alone(trial, run.seconds, false).seconds;
      if (seconds < run.seconds * (1 - 1e-9)) run.layout = trial, run.seconds = seconds;
    }
  });
  const auto left_out = [](const Run& run) { return run.seconds == kInfinity; };
  runs.erase(std::remove_if(runs.begin(), runs.end(), left_out), runs.end());
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
}

// Improve layouts by every single change of a cut, of a device's worker and of the warm-up, until none helps.
inline void Search::descend(std::vector<Run>& runs, int64_t work, bool contention) const {
  const int64_t share = runs.empty() ? 0 : work / static_cast<int64_t>(runs.size());
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    Layout& best = runs[i].layout;
    int64_t left = share;
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
          for (int other = boundary; other < std::min(best.stages(), boundary + 3) && left > 0; ++other) {
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
        // Of neighbours alike only the first is moved.
        const auto alike = [&](int a, int b) { return place(best.device_at[a]) == place(best.device_at[b]); };
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

// The orders in which planned stages take devices: as given, one device of each server in turn, the last server first;
// devices of several kinds also by falling and by rising speed.
inline std::vector<std::vector<int>> Search::device_orders() const {
  std::vector<int> given(p_.devices);
  for (int d = 0; d < p_.devices; ++d) given[d] = d;
  std::vector<std::vector<int>> found{given};
  // What stages on devices in this order depend on: the kinds, and the links of servers that are numbered as they come.
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
    const auto alike = [&](const std::vector<int>& other) { return pattern(other) == pattern(order); };
    if (std::none_of(found.begin(), found.end(), alike)) found.push_back(order);
  };
  std::vector<int> place(p_.devices), seen(p_.servers, 0);
  for (int d = 0; d < p_.devices; ++d) place[d] = seen[p_.server[d]]++;
  add([&](int a, int b) { return place[a] < place[b]; });
  add([&](int a, int b) { return p_.server[a] > p_.server[b]; });
  if (p_.kinds > 1) {
    add([&](int a, int b) { return speed_[p_.kind[a]] > speed_[p_.kind[b]]; });
    add([&](int a, int b) { return speed_[p_.kind[a]] < speed_[p_.kind[b]]; });
  }
  return found;
}

// Even pipelines of every number of workers, with one stage a worker and more, and all ways to give the last few or
// many devices the end of the model, at every size. Such layouts differ so much from each other that moves rarely lead
// from one to the other.
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

// Stages by dynamic programming, as starts: for each device order, micro-batch size and limit of a stage's seconds, the
// contiguous stages on contiguous devices whose forwards, backwards and transfers take the fewest seconds together, with
// and without their AllReduces, if no stage takes longer than the limit (Alpa, section 5.2, equation 3), and a third time
// if no transfer, nor all that a server's interface moves of a micro-batch, does. The fourth time later stages are
// shorter: what a stage takes for all micro-batches, and the stages before it to fill and drain the pipeline, is together
// at most M times the limit. Rows, links and memory are estimated here; what comes out is evaluated as any other layout.
inline std::vector<Run> Search::planned_starts() const {
  const int most_cuts = p_.devices > 32 ? 64 : 128;  // with more the stages take longer to plan than to search
  // Cuts with nearly equal work between them; all where there are few blocks.
  std::vector<int> cuts{0};
  const double work = work_[p_.blocks];
  for (int block = 1; block < p_.blocks; ++block) {
    const bool far = work_[block] - work_[cuts.back()] >= work / most_cuts * 0.9;
    if (p_.blocks <= most_cuts || far || work <= 0) cuts.push_back(block);
  }
  cuts.push_back(p_.blocks);
  std::vector<std::pair<std::vector<int>, int>> tasks;
  for (const auto& order : device_orders())
    for (int z = 0; z < p_.sizes; z += 1 + p_.sizes / 16) tasks.push_back({order, z});
  std::vector<std::vector<Run>> found(tasks.size());
  each(tasks.size(), [&](size_t i, Evaluator&) { found[i] = plan_stages(cuts, tasks[i].first, tasks[i].second); });
  std::vector<Run> runs;
  for (const auto& some : found) runs.insert(runs.end(), some.begin(), some.end());
  return runs;
}

// The planned stages of one device order and micro-batch size, under rising limits until longer stages cannot pay.
inline std::vector<Run> Search::plan_stages(const std::vector<int>& cuts, const std::vector<int>& order, int z) const {
  constexpr int kMostUnits = 64;  // of devices, which are given to stages as a whole
  constexpr int kFineCells = 3000;  // cuts times units up to which limits rise by 2%
  constexpr double kWorse = 1.5;  // by an estimate; stages that are so much slower than others are no good start
  const int n = static_cast<int>(cuts.size()) - 1, unit = (p_.devices + kMostUnits - 1) / kMostUnits;
  const int units = p_.devices / unit;
  const double rows = static_cast<double>(p_.size[z]), m = static_cast<double>(p_.micro_batches[z]);
  const double scale = rows / p_.batch;
  std::vector<int> counts;
  for (int count = 1; count <= units; count += count < 8 ? 1 : count / 4) counts.push_back(count);
  std::vector<double> speed(units + 1, 0), memory(units, kInfinity);
  for (int u = 0; u < units; ++u) {
    for (int d = u * unit; d < (u + 1) * unit; ++d) {
      speed[u + 1] += speed_[p_.kind[order[d]]], memory[u] = std::min(memory[u], p_.memory[p_.kind[order[d]]]);
    }
    speed[u + 1] += speed[u];
  }
  // The devices of a stage: `units` from one unit on, and what its figures depend on.
  struct Group {
    int units;
    double seconds, stash, fixed, ring, memory;  // of a second of work, and of a byte; bytes of its smallest device
    bool one_server;
  };
  std::vector<std::vector<Group>> groups(units);
  for (int a = 0; a < units; ++a) {
    double least_memory = kInfinity;
    int seen = a;
    for (const int count : counts) {
      if (a + count > units || static_cast<double>(count) * unit * p_.least_rows > rows) break;
      for (; seen < a + count; ++seen) least_memory = std::min(least_memory, memory[seen]);
      const double r = static_cast<double>(count) * unit, share = (speed[a + count] - speed[a]) / r;
      // How many times less than the whole the busiest device computes.
      const double divided = p_.kinds > 1 ? r * share : p_.whole_rows ? rows / std::ceil(rows / r) : r;
      const int x = p_.server[order[a * unit]], y = p_.server[order[(a + count) * unit - 1]];
      const double ring = 2 * (r - 1) / r * (x == y ? p_.inside[x] : p_.interface_);
      groups[a].push_back({count, rows / divided, scale / divided, p_.fixed_factor + p_.shared_factor / r, ring,
                           least_memory, x == y});
    }
  }
  struct Sending {
    double seconds = 0;
    bool between = false;  // servers
  };
  const int row = units + 1;
  std::vector<Sending> sending((n + 1) * row);  // at cut i, from the device before unit a to its first one; else none
  std::vector<double> work(n + 1), bytes(n + 1), stash(n + 1);  // sums up to each cut
  for (int i = 0; i <= n; ++i) {
    work[i] = work_[cuts[i]], bytes[i] = p_.parameters[cuts[i]], stash[i] = p_.stash[cuts[i]];
    for (int a = 1; a < units && i && i < n; ++a) {
      const int x = p_.server[order[a * unit - 1]], y = p_.server[order[a * unit]];
      const double wait = x == y ? p_.inside_latency[x] : p_.interface_latency;
      sending[i * row + a] = {wait + p_.boundary[cuts[i]] * scale * (x == y ? p_.inside[x] : p_.interface_), x != y};
    }
  }
  std::vector<Run> runs;
  std::vector<double> best((n + 1) * row);
  std::vector<int> from_cut((n + 1) * row), from_unit((n + 1) * row);
  const auto solve = [&](double limit, bool rings, bool sends, bool tapers) {
    std::fill(best.begin(), best.end(), kInfinity);
    best[0] = 0;
    for (int i = 0; i < n; ++i) {
      if (!p_.splittable[cuts[i]] && p_.kinds > 1) continue;
      for (int a = 0; a < units; ++a) {
        const double before = best[i * row + a];
        if (before == kInfinity) continue;
        const Sending in = sending[i * row + a];
        const double own = tapers ? limit - (before + 2 * in.seconds) / m : limit;
        if (own <= 0 || (sends && in.seconds > own)) continue;
        for (const Group& group : groups[a]) {
          const int at = a + group.units;
          for (int j = i + 1; j <= n; ++j) {
            const double seconds = (work[j] - work[i]) * group.seconds, parameters = bytes[j] - bytes[i];
            if (seconds + group.ring * parameters / m > own) break;
            const bool fits = parameters * group.fixed + (stash[j] - stash[i]) * group.stash <= group.memory;
            if (!fits && !p_.may_recompute && !p_.recompute_all) break;
            if (sends) {
              const Sending out = sending[j * row + at];
              // One interface moves what comes from the stage before and what goes to the next.
              const bool one_interface = p_.contention && group.one_server && in.between && out.between;
              if (out.seconds + (one_interface ? in.seconds : 0) > own) continue;
            }
            const double found = before + seconds + 2 * in.seconds + (rings ? group.ring * parameters : 0);
            const int to = j * row + at;
            if (found < best[to]) best[to] = found, from_cut[to] = i, from_unit[to] = a;
          }
        }
      }
    }
    int end = -1;
    for (int u = 1; u <= units; ++u)
      if (best[n * row + u] < (end < 0 ? kInfinity : best[n * row + end])) end = u;
    return end;
  };
  const double equal_share = work_[p_.blocks] * rows / std::max(speed[units], 1e-300);
  double least = kInfinity;
  const double fine = m >= 16 && n * units <= kFineCells ? 1.02 : 1.04;
  for (double factor = 1; factor <= 2 * units; factor *= factor < 1.4 ? fine : factor < 2 ? 1.1 : 1.4) {
    const double limit = equal_share * factor;
    if ((m - 1) * limit > least * kWorse) break;
    for (const auto& [rings, sends, tapers] :
         {std::tuple{false, false, false}, {true, false, false}, {true, true, false}, {true, true, true}}) {
      const int end = rings && units == 1 ? -1 : solve(limit, rings, sends, tapers);
      if (end < 0) continue;
      if (tapers) {
        least = std::min(least, m * limit);
      } else if (rings || units == 1) {
        least = std::min(least, best[n * row + end] + (m - 1) * limit);
      }
      std::vector<std::pair<int, int>> stages;  // the first cut and the first unit of each stage, the last one first
      for (int j = n, u = end; j > 0;) {
        const int to = j * row + u;
        j = from_cut[to], u = from_unit[to];
        stages.push_back({j, u});
      }
      const int count = static_cast<int>(stages.size());
      if ((p_.workers && count != p_.workers) || count > std::min(p_.devices, p_.blocks)) continue;
      Layout l = empty(z, count, 1);
      l.device_at = order;
      std::fill(l.owner.begin(), l.owner.end(), kIdleDevice);
      for (int s = 0; s < count; ++s) {
        const auto [cut, first] = stages[count - 1 - s];
        const int last = s + 1 < count ? stages[count - 2 - s].second : end;
        l.starts[s] = cuts[cut];
        for (int d = first * unit; d < last * unit; ++d) l.owner[d] = s;
      }
      runs.push_back({l, kInfinity});
    }
  }
  return runs;
}

}  // namespace dapple
