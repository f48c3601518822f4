// The C interface of the annealer, for benchmarks/annealer/__init__.py.
#include "search.h"

using namespace dapple;

namespace {

// Find K_i that make the step shorter, one stage's change at a time: with more in flight, then fewer where it costs
// nothing. The policies' K_i are where it starts.
double improve_warm_up(const Problem& p, Evaluator& evaluator, const Layout& layout, std::vector<int>& warm_up,
                       double seconds) {
  const int stages = layout.stages(), most = static_cast<int>(std::min<int64_t>(p.micro_batches[layout.size], 1 << 20));
  const auto attempt = [&](const std::vector<int>& trial, double ceiling) {
    const double found = evaluator.with_warm_up(layout, trial);
    if (found >= ceiling) return false;
    warm_up = trial, seconds = found;
    return true;
  };
  for (int more = 1; more <= stages; more *= 2) {
    for (bool changed = true; changed;) {
      changed = false;
      for (int s = 0; s + 1 < stages; ++s) {
        std::vector<int> trial = warm_up;
        for (int i = 0; i <= s; ++i) trial[i] = std::min(trial[i] + more, most);
        changed = (trial != warm_up && attempt(trial, seconds * (1 - 1e-9))) || changed;
      }
    }
  }
  for (int s = stages - 1; s >= 0; --s) {
    while (warm_up[s] > 1 && (s + 1 == stages || warm_up[s] > warm_up[s + 1])) {
      std::vector<int> trial = warm_up;
      --trial[s];
      if (!attempt(trial, seconds * (1 + 1e-9))) break;
    }
  }
  return seconds;
}

void write(const Run& run, const std::vector<int>& warm_up, const std::vector<int64_t>& rows_of, int row, int width, int devices, int32_t* shape,
           int32_t* starts, int32_t* owner, int32_t* device_at, uint8_t* recompute, int32_t* in_flight,
           int64_t* rows, double* seconds) {
  const Layout& l = run.layout;
  shape[4 * row] = l.size, shape[4 * row + 1] = l.workers, shape[4 * row + 2] = l.chunks, shape[4 * row + 3] = l.slope;
  for (int s = 0; s <= l.stages(); ++s) starts[row * width + s] = l.starts[s];
  for (int s = 0; s < l.stages(); ++s) recompute[row * width + s] = l.recompute[s];
  for (size_t s = 0; s < warm_up.size(); ++s) in_flight[row * width + s] = warm_up[s];
  for (int d = 0; d < devices; ++d) owner[row * devices + d] = l.owner[d], device_at[row * devices + d] = l.device_at[d];
  for (int d = 0; d < devices; ++d) rows[row * devices + d] = rows_of[d];
  seconds[row] = run.seconds;
}

Layout read(int width, int devices, const int32_t* shape, const int32_t* starts, const int32_t* owner,
            const int32_t* device_at, const uint8_t* recompute) {
  Layout l;
  l.size = shape[0], l.workers = shape[1], l.chunks = shape[2], l.slope = shape[3];
  l.starts.assign(starts, starts + width);
  l.recompute.assign(recompute, recompute + width);
  l.owner.assign(owner, owner + devices);
  l.device_at.assign(device_at, device_at + devices);
  return l;
}

}  // namespace

extern "C" {

// Search layouts and write the fastest `results` into the arrays, by rising seconds; return how many there are. `width`:
// most stages + 1.
int annealer_search(const Problem* problem, const double* work, const double* speed, int most_chunks, int threads,
                  int64_t amount, uint64_t seed, int results, int width, int32_t* shape, int32_t* starts,
                  int32_t* owner, int32_t* device_at, uint8_t* recompute, int32_t* in_flight, int64_t* rows,
                  double* seconds,
                  const volatile uint8_t* stop) {
  const Problem& p = *problem;
  const std::vector<double> sums(work, work + p.blocks + 1);
  const Search search(p, sums, speed, most_chunks, threads, stop);
  std::vector<Run> begin = search.starts();
  for (Run& run : begin) run.layout.starts.resize(width), run.layout.recompute.resize(width);
  search.rank(begin, false, false);
  // The fastest of each number of workers, stages per worker and size, so that starts differ.
  std::vector<Run> chosen;
  const auto distinct = [](const std::vector<Run>& runs, size_t most, int alike, bool by_size) {
    std::vector<Run> kept;
    for (const Run& run : runs) {
      int same = 0;
      for (const Run& other : kept)
        same += by_size ? other.layout.size == run.layout.size && other.layout.chunks == run.layout.chunks
                        : other.layout.workers == run.layout.workers && other.layout.chunks == run.layout.chunks;
      if (same < alike && kept.size() < most) kept.push_back(run);
    }
    return kept;
  };
  const bool contention = p.contention && p.devices <= 128;
  chosen = distinct(begin, 16, 3, false);
  const auto more = distinct(begin, 8, 2, true);
  chosen.insert(chosen.end(), more.begin(), more.end());
  auto in_order = search.anneal(chosen, amount / 10, 0.2, 0.0005, false, Search::kInOrder, seed * 10 + 1);
  std::vector<Run> second = distinct(in_order, 10, 3, false);
  if (p.servers > 1 && p.servers < p.devices) {
    const auto scattered = search.anneal(chosen, amount / 10, 0.2, 0.0005, false, Search::kScattered, seed * 10 + 2);
    const auto kept = distinct(scattered, 6, 3, false);
    second.insert(second.end(), kept.begin(), kept.end());
  }
  second.insert(second.end(), chosen.begin(), chosen.begin() + std::min<size_t>(chosen.size(), 6));
  auto free = search.anneal(second, amount / 5, 0.05, 0.0005, false, Search::kFree, seed * 10 + 3);
  free.insert(free.end(), second.begin(), second.end());
  search.rank(free, contention, false);
  std::vector<Run> kept = distinct(free, 8, 4, false);
  kept = search.anneal(kept, amount / 4, 0.05, 0.0005, contention, Search::kFree, seed * 10 + 4);
  kept.resize(std::min<size_t>(kept.size(), 4));
  kept = search.anneal(kept, amount / 5, 0.03, 0.0005, contention, Search::kFree, seed * 10 + 5);
  auto last = kept;
  kept.insert(kept.end(), free.begin(), free.end());
  last.resize(std::min<size_t>(last.size(), 2));
  last = search.anneal(last, amount * 3 / 20, 0.01, 0.0003, contention, Search::kFree, seed * 10 + 6);
  last.insert(last.end(), kept.begin(), kept.end());
  last.insert(last.end(), begin.begin(), begin.begin() + std::min<size_t>(begin.size(), 4));
  std::stable_sort(last.begin(), last.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
  last.resize(std::min<size_t>(last.size(), 12));
  search.descend(last, amount / 5, contention);
  last.resize(std::min<size_t>(last.size(), 6));
  std::vector<std::vector<int>> warm_ups(last.size());
  std::vector<std::vector<int64_t>> rows_of(last.size());
  search.each(last.size(), [&](size_t i, Evaluator& evaluator) {
    Run& run = last[i];
    const Step alone = evaluator.alone(run.layout, kInfinity, true);
    rows_of[i] = evaluator.rows_of_devices();
    run.seconds = p.contention ? evaluator.shared(run.layout, alone, kInfinity, true).seconds : alone.seconds;
    if (!alone.fits || run.layout.chunks > 1 || p.slope != kAnySlope) return;
    warm_ups[i] = evaluator.warm_up();
    run.seconds = improve_warm_up(p, evaluator, run.layout, warm_ups[i], run.seconds);
  });
  std::vector<size_t> order(last.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return last[a].seconds < last[b].seconds; });
  const int count = std::min<int>(results, static_cast<int>(last.size()));
  for (int row = 0; row < count; ++row)
    write(last[order[row]], warm_ups[order[row]], rows_of[order[row]], row, width, p.devices, shape, starts, owner, device_at, recompute,
          in_flight, rows, seconds);
  return count;
}

// Return the step of one layout, exactly: alone, or with contention; kUnfit and more where it does not fit.
double annealer_step(const Problem* problem, int width, const int32_t* shape, const int32_t* starts, const int32_t* owner,
                   const int32_t* device_at, const uint8_t* recompute, int32_t* in_flight) {
  Evaluator evaluator(*problem);
  const Layout l = read(width, problem->devices, shape, starts, owner, device_at, recompute);
  const Step alone = evaluator.alone(l, kInfinity, true);
  for (size_t s = 0; s < evaluator.warm_up().size(); ++s) in_flight[s] = evaluator.warm_up()[s];
  return problem->contention ? evaluator.shared(l, alone, kInfinity, true).seconds : alone.seconds;
}
}
