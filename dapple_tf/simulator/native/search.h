// Simulated annealing over layouts by random moves. Its length is an amount of work: roughly, of simulated actions.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <tuple>

#include "moves.h"
#include "stage_planner.h"

namespace dapple {

// A layout that the search improves, and the seconds of its step.
struct Run {
  Layout layout;
  double seconds = kInfinity;
};

// Makes starting layouts and improves layouts. The result does not depend on the number of threads, since each layout
// is improved with random numbers of its own.
class Search {
 public:
  // `row_seconds`, `speed`: as for StagePlanner. `stop`: the search ends soon after another thread sets it.
  Search(const Problem& problem, const std::vector<double>& row_seconds, const double* speed, int threads,
         const volatile uint8_t* stop)
      : p_(problem),
        row_seconds_(row_seconds),
        speed_(speed),
        moves_(problem, row_seconds, speed),
        threads_(threads),
        stop_(stop) {}
  // Which devices a worker may have: any; consecutive ones in the device order; or ones that alternate with those of
  // other workers.
  enum DeviceRule { kFree = 0, kInOrder = 1, kScattered = 2 };
  // How the step of a layout is found: by an estimate, or by simulation without contention or with it.
  enum Model { kEstimate, kAlone, kShared };
  // Improve each layout with an equal part of the work; return them, the fastest first. The temperature falls from
  // `first` to `last`: a move that makes the step longer is accepted if it does so by less than a random fraction,
  // whose mean is the temperature.
  std::vector<Run> anneal(std::vector<Run> runs, int64_t work, double first, double last, Model model, DeviceRule rule,
                          uint64_t seed) const;
  std::vector<Run> even_starts() const;
  std::vector<Run> planned_starts() const;
  void descend(std::vector<Run>& runs, int64_t work, bool contention) const;
  void rank(std::vector<Run>& runs, bool contention) const;
  const Moves& moves() const { return moves_; }
  // Call the function with each number below `count`, in several threads. Make no more calls once `stop` is set.
  void each(size_t count, const std::function<void(size_t, Evaluator&)>& function) const;

 private:
  std::vector<Pools> pools() const;
  void anneal_one(Run& run, Evaluator& evaluator, int64_t work, double first, double last, Model model, DeviceRule rule,
                  uint64_t seed) const;
  const Problem& p_;
  const std::vector<double>& row_seconds_;  // [blocks + 1] prefix sums: seconds of a row on a device of the first kind
  const double* speed_;                     // [kinds] relative to the first kind
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
      for (size_t i = next++; i < count && !*stop_; i = next++) function(i, evaluator);
    } catch (...) {  // such as a lack of memory: an exception that leaves a thread ends the process
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int t = 1; t < threads_ && t < static_cast<int>(count); ++t) others.emplace_back(take);
  } catch (const std::system_error&) {  // the system allows no more threads: go on with those that have started
  }
  take();
  for (auto& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

// Improve one layout: replace it by the fastest one that is found.
inline void Search::anneal_one(Run& run, Evaluator& evaluator, int64_t work, double first, double last, Model model,
                               DeviceRule rule, uint64_t seed) const {
  const bool contention = model == kShared;
  const auto measure = [&](const Layout& l, double ceiling) {
    return model == kEstimate ? evaluator.estimate(l, ceiling) : evaluator.alone(l, ceiling, false);
  };
  // To save time, a step with contention is often only estimated: the step without contention, times the ratio of the
  // two for the layout that was last simulated with contention. At most so many moves in a row are accepted by this
  // estimate.
  constexpr int kMostEstimates = 3;
  Random random{seed * 2654435761u + 88172645463325252u};
  const auto apply_rule = [&](Layout& l) {
    if (rule != kFree) moves_.reassign(l, 0, l.workers, rule == kScattered);
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
    if (!moves_.apply_random(trial, random) || (p_.workers && trial.workers != p_.workers)) continue;
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
                                       DeviceRule rule, uint64_t seed) const {
  const int64_t each_work = runs.empty() ? 0 : work / static_cast<int64_t>(runs.size());
  each(runs.size(), [&](size_t i, Evaluator& evaluator) {
    anneal_one(runs[i], evaluator, each_work, first, last, model, rule, seed * 1000 + i + 1);
  });
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
  return runs;
}

// Compute the step of each layout, choose its K_i, and sort the layouts, the fastest first. To save time, other K_i are
// tried only for layouts that are not far slower than the fastest one, and layouts with several stages per worker are
// left out if they are far slower.
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

// Improve layouts by descent, until none of these changes makes the step shorter: moving a cut, alone or together with
// some of the cuts after it, by one block or two; giving one device to another worker or making it idle; and setting
// Layout::ahead of all stages to the same number.
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
        // Of devices that are alike and follow each other in the device order, try only the first one.
        const auto alike = [&](int a, int b) {
          return moves_.server_and_kind(best.device_at[a]) == moves_.server_and_kind(best.device_at[b]);
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

// Return the pools with which StagePlanner plans. Most consist of one list of all devices, in one of these orders: as
// given; one device of each of several servers in turn; the last server first; by falling or by rising speed, with
// equally fast devices as given, or one of each server in turn. With several kinds of devices, the last pools have a
// list for each kind.
inline std::vector<Pools> Search::pools() const {
  std::vector<int> given(p_.devices);
  for (int d = 0; d < p_.devices; ++d) given[d] = d;
  std::vector<Pools> found{{given}};
  // Return all that the costs of stages on devices in this order depend on. Of orders with equal patterns, only the
  // first is kept. Servers are numbered in the order in which they come, unless some pair of servers has its own link.
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
  // `together` servers take turns. With many devices planning takes seconds, so only all servers together are tried.
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

// Return starting layouts without planning: balanced pipelines of many numbers of workers, with one or several stages
// per worker; and pipelines of two stages, with many numbers of devices for the second stage and many cuts. Moves
// rarely lead from one of these layouts to another, because they differ so much.
inline std::vector<Run> Search::even_starts() const {
  std::vector<Run> runs;
  const int most = std::min(p_.devices, p_.blocks);
  const auto grow = [&](int count) { return count < 8 || p_.workers ? count + 1 : count * 5 / 4; };
  // Make devices idle that a worker has beyond those for which a micro-batch has rows.
  const auto drop_surplus = [&](Layout& l) {
    std::vector<int> have(l.workers, 0);
    for (int& owner : l.owner)
      if (int64_t{++have[owner]} * p_.least_rows > p_.size[l.size]) owner = kIdleDevice;
  };
  for (int workers = 1;; workers = std::min(most, grow(workers))) {
    for (int chunks = 1; chunks <= (workers > 1 ? p_.most_chunks : 1); ++chunks) {
      if (!p_.may_have[chunks] || workers * chunks > p_.blocks || (p_.workers && workers != p_.workers)) continue;
      for (const bool interleave : {false, true}) {
        if (interleave && (p_.servers == 1 || p_.servers == p_.devices || workers == 1)) continue;
        for (int z = 0; z < p_.sizes; ++z) {
          Layout l = empty_layout(p_, z, workers, chunks);
          for (int d = 0; d < p_.devices; ++d) l.owner[d] = static_cast<int>(int64_t{d} * workers / p_.devices);
          drop_surplus(l);
          if (interleave) moves_.reassign(l, 0, workers - 1, true);
          for (int s = 0; s < l.stages(); ++s) l.starts[s] = s;
          moves_.balance_cuts(l, 0, l.stages() - 1);
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
        Layout l = empty_layout(p_, z, 2, 1);
        for (int d = 0; d < p_.devices; ++d) l.owner[d] = d >= p_.devices - last;
        drop_surplus(l);
        l.starts[1] = cut;
        runs.push_back({l, kInfinity});
      }
    }
  }
  return runs;
}

// Return the starting layouts that StagePlanner finds for all pools and, if there are many, for some of the micro-batch
// sizes.
inline std::vector<Run> Search::planned_starts() const {
  const int most_cuts = p_.devices > 32 ? 64 : 128;  // with more, planning the stages takes longer than the search
  // Take all cuts if there are few blocks, else cuts with nearly equal seconds between them.
  std::vector<int> cuts{0};
  const double all_seconds = row_seconds_[p_.blocks];
  for (int block = 1; block < p_.blocks; ++block) {
    const bool far = row_seconds_[block] - row_seconds_[cuts.back()] >= all_seconds / most_cuts * 0.9;
    if (p_.blocks <= most_cuts || far || all_seconds <= 0) cuts.push_back(block);
  }
  cuts.push_back(p_.blocks);
  std::vector<std::pair<Pools, int>> tasks;
  for (const auto& some : pools())
    for (int z = 0; z < p_.sizes; z += 1 + p_.sizes / 16) tasks.push_back({some, z});
  std::vector<std::vector<Layout>> found(tasks.size());
  each(tasks.size(), [&](size_t i, Evaluator&) {
    found[i] = StagePlanner(p_, row_seconds_, speed_, cuts, tasks[i].first, tasks[i].second).plan();
  });
  std::vector<Run> runs;
  for (const auto& some : found)
    for (const Layout& layout : some) runs.push_back({layout, kInfinity});
  return runs;
}

}  // namespace dapple
