// The C interface: what Python calls with ctypes.
#include <new>

#include "autopipe.h"
#include "formula.h"
#include "order_moves.h"
#include "partition.h"
#include "search.h"

using namespace dapple;

namespace {

// Find K_i that make the step shorter, and return its seconds. First K_i is raised, of a stage and all stages before
// it. Then K_i are lowered where that makes the step no longer: to those of the lowest slope with which this holds
// (policy A, B ...), then one at a time. `work`: the search ends when this amount is used up.
double improve_warm_up(const Problem& p, Evaluator& evaluator, const Layout& layout, std::vector<int>& warm_up,
                       double seconds, int64_t work) {
  const int stages = layout.stages(), most = static_cast<int>(std::min<int64_t>(p.micro_batches[layout.size], 1 << 20));
  const int64_t each = 2 * stages * p.micro_batches[layout.size] * (p.contention ? 25 : 1);
  const auto attempt = [&](const std::vector<int>& trial, double ceiling) {
    if ((work -= each) < 0) return false;
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
  for (int slope = 1; slope <= kMostSlope; ++slope) {
    std::vector<int> trial = warm_up;
    for (int s = 0; s < stages; ++s) trial[s] = std::min(trial[s], slope * (stages - 1 - s) + 1);
    if (trial == warm_up || attempt(trial, seconds * (1 + 1e-9))) break;
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

void add(std::vector<Run>& runs, const std::vector<Run>& more) { runs.insert(runs.end(), more.begin(), more.end()); }

void sort(std::vector<Run>& runs) {
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.seconds < b.seconds; });
}

// Return the fastest layouts, at most `most`, so that they differ. All have a shape (the numbers of workers and of
// stages per worker) and a size (of micro-batches). A layout is left out if `alike` of those kept have its shape and
// `alike` of them have its size, and if one of them is equal in shape, size and seconds.
std::vector<Run> distinct(const std::vector<Run>& runs, size_t most, int alike) {
  std::vector<Run> kept;
  for (const Run& run : runs) {
    int same_shape = 0, same_size = 0, equal = 0;
    for (const Run& other : kept) {
      const bool shape = other.layout.workers == run.layout.workers && other.layout.chunks == run.layout.chunks;
      const bool size = other.layout.size == run.layout.size && other.layout.chunks == run.layout.chunks;
      same_shape += shape, same_size += size;
      equal += shape && size && other.seconds == run.seconds;
    }
    if ((same_shape < alike || same_size < alike) && !equal && kept.size() < most) kept.push_back(run);
  }
  return kept;
}

// Return the runs that take at most `factor` times as long as the fastest one; `runs` are sorted.
std::vector<Run> near(std::vector<Run> runs, double factor) {
  const auto far = [&](const Run& run) { return run.seconds > factor * runs.front().seconds; };
  runs.erase(std::find_if(runs.begin(), runs.end(), far), runs.end());
  return runs;
}

// One search from the given layouts. First steps are estimated; then fewer and fewer layouts are simulated with
// contention, at falling temperatures. `starts`: sets of layouts; at first those of one set do not compete with those
// of another. `found`: the layouts of the searches before, which take part once steps are simulated.
std::vector<Run> anneal_starts(const Search& search, const Problem& p, const std::vector<std::vector<Run>>& starts,
                               const std::vector<Run>& found, int64_t amount, uint64_t seed, bool contention) {
  const Search::Model model = contention ? Search::kShared : Search::kAlone;
  std::vector<Run> begin, second;
  for (const auto& set : starts) {
    const uint64_t number = seed * 100 + begin.size();
    const auto in_order = [&](Search::DeviceRule rule, uint64_t own_seed, size_t most) {
      auto runs = search.anneal(set, amount / 36, 0.2, 0.0005, Search::kEstimate, rule, own_seed);
      search.rank(runs, contention);
      add(second, distinct(runs, most, 1));
    };
    in_order(Search::kInOrder, number + 1, 16);
    if (p.servers > 1 && p.servers < p.devices) in_order(Search::kScattered, number + 2, 8);
    if (p.servers > 1 && (p.servers < p.devices || p.kinds > 1 || p.own_links))
      in_order(Search::kFree, number + 3, 16);
    std::vector<Run> chosen = set;
    chosen.resize(std::min<size_t>(chosen.size(), 6));
    add(second, chosen);
    add(begin, chosen);
  }
  add(second, distinct(found, 16, 4));
  search.rank(second, contention);
  second = distinct(second, 48, 4);
  auto free = search.anneal(second, amount / 3, 0.05, 0.0005, model, Search::kFree, seed * 10 + 3);
  free.insert(free.end(), second.begin(), second.end());
  search.rank(free, contention);
  std::vector<Run> kept = distinct(free, 14, 2);
  kept = search.anneal(kept, amount / 3, 0.05, 0.0005, model, Search::kFree, seed * 10 + 4);
  kept = distinct(kept, 7, 1);
  kept = search.anneal(kept, amount / 4, 0.03, 0.0005, model, Search::kFree, seed * 10 + 5);
  auto last = distinct(kept, 3, 1);
  last = search.anneal(last, amount * 3 / 20, 0.01, 0.0003, model, Search::kFree, seed * 10 + 6);
  add(last, kept);
  add(last, free);
  add(last, begin);
  sort(last);
  return last;
}

// Write a layout into row `row` of the result arrays of `dapple_search`.
void write(const Run& run, const std::vector<int>& warm_up, const std::vector<int64_t>& rows_of, int row, int width,
           int devices, int32_t* shape, int32_t* starts, int32_t* owner, int32_t* device_at, uint8_t* recompute,
           int32_t* in_flight, int64_t* rows, double* seconds) {
  const Layout& l = run.layout;
  shape[3 * row] = l.size, shape[3 * row + 1] = l.workers, shape[3 * row + 2] = l.chunks;
  for (int s = 0; s <= l.stages(); ++s) starts[row * width + s] = l.starts[s];
  for (int s = 0; s < l.stages(); ++s) recompute[row * width + s] = l.recompute[s];
  for (size_t s = 0; s < warm_up.size(); ++s) in_flight[row * width + s] = warm_up[s];
  for (int d = 0; d < devices; ++d) {
    owner[row * devices + d] = l.owner[d], device_at[row * devices + d] = l.device_at[d];
    rows[row * devices + d] = rows_of[d];
  }
  seconds[row] = run.seconds;
}

// Return the layout in these arrays.
Layout read(int width, int devices, const int32_t* shape, const int32_t* starts, const int32_t* owner,
            const int32_t* device_at, const uint8_t* recompute) {
  Layout l;
  l.size = shape[0], l.workers = shape[1], l.chunks = shape[2];
  l.starts.assign(starts, starts + width);
  l.recompute.assign(recompute, recompute + width), l.ahead.assign(width, 2);
  l.owner.assign(owner, owner + devices);
  l.device_at.assign(device_at, device_at + devices);
  return l;
}

// After the searches that are asked for, a longer one follows as long as the last one has found a layout that is faster
// by the fraction kFaster. It does kLonger times their work, but at most kLongest. All together there are at most
// kMostTimes as many as are asked for.
constexpr int64_t kLonger = 4, kLongest = 70000000;
constexpr int kMostTimes = 4;
constexpr double kFaster = 1e-3;

}  // namespace

extern "C" {

const char* dapple_source_digest() { return DAPPLE_SOURCE_DIGEST; }

// Search layouts and write the fastest ones, at most `results`, into the arrays, by rising seconds. Return how many
// there are; -1 where memory is lacking. `amount`: the work of each of the `searches`. They have different random
// numbers. All begin with the same layouts, and each also with those that the searches before it have found. As long as
// the last search has found a faster layout, a longer one follows. `width`: the most stages + 1.
// `row_seconds`, `speed`: see StagePlanner.
int dapple_search(const Problem* problem, const double* row_seconds, const double* speed, int threads,
                  int64_t amount, uint64_t seed, int searches, int results, int width, int32_t* shape,
                  int32_t* starts, int32_t* owner, int32_t* device_at, uint8_t* recompute, int32_t* in_flight,
                  int64_t* rows, double* seconds, const volatile uint8_t* stop) try {
  const Problem& p = *problem;
  const std::vector<double> sums(row_seconds, row_seconds + p.blocks + 1);
  const Search search(p, sums, speed, threads, stop);
  const bool contention = p.contention;
  std::vector<std::vector<Run>> start_sets;
  for (const bool planned : {false, true}) {
    std::vector<Run> runs = planned ? search.planned_starts() : search.even_starts();
    search.rank(runs, false);
    if (contention) {
      runs = distinct(runs, 48, 2);
      search.rank(runs, true);
    }
    start_sets.push_back(distinct(runs, 48, 4));
  }
  std::vector<Run> last;
  int64_t all = 0;  // the work of all searches
  const int most = searches > 1 ? kMostTimes * searches : 1;
  const int64_t longer = std::max(amount, std::min(kLonger * amount, kLongest));
  int done = 0;
  for (bool faster = true; done < searches || (faster && done < most && !*stop); ++done) {
    const double before = last.empty() ? kInfinity : last.front().seconds;
    const int64_t own = done < searches ? amount : longer;
    add(last, anneal_starts(search, p, start_sets, last, own, seed + done, contention));
    sort(last);
    all += own, faster = !last.empty() && last.front().seconds < before * (1 - kFaster);
  }
  if (searches > 1) {  // improve what all searches have found, together
    auto few = distinct(last, 4, 1);
    const Search::Model model = contention ? Search::kShared : Search::kAlone;
    add(last, search.anneal(few, all / 4, 0.015, 0.0003, model, Search::kFree, seed * 10 + 7));
    sort(last);
  }
  last = distinct(near(last, 1.1), 12 + 4 * (done - 1), 2);
  search.descend(last, all / 5, contention);
  last = distinct(near(last, 1.03), 6 + 2 * (done - 1), 2);
  std::vector<std::vector<int>> warm_ups(last.size());
  std::vector<std::vector<int64_t>> rows_of(last.size());
  search.each(last.size(), [&](size_t i, Evaluator& evaluator) {
    Run& run = last[i];
    Step alone;
    const auto measure = [&](const Layout& layout) {
      alone = evaluator.alone(layout, kInfinity, true);
      return p.contention ? evaluator.shared(layout, alone, kInfinity, true).seconds : alone.seconds;
    };
    double seconds = measure(run.layout);
    // Undo re-computation that saves no time: moves set it at random, also where it changes nothing.
    for (size_t s = 0; s < run.layout.recompute.size(); ++s) {
      if (!run.layout.recompute[s]) continue;
      Layout trial = run.layout;
      trial.recompute[s] = 0;
      const double without = measure(trial);
      if (without <= seconds * (1 + 1e-9)) run.layout = trial, seconds = without;
    }
    run.seconds = measure(run.layout);
    rows_of[i] = evaluator.rows_of_devices();
    if (!alone.fits || run.layout.chunks > 1 || p.slope != kAnySlope) return;
    warm_ups[i] = evaluator.warm_up();
    run.seconds = improve_warm_up(p, evaluator, run.layout, warm_ups[i], run.seconds, amount / 20);
  });
  if (*stop) return 0;  // some have no rows
  std::vector<size_t> order(last.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return last[a].seconds < last[b].seconds; });
  const int count = std::min<int>(results, static_cast<int>(last.size()));
  for (int row = 0; row < count; ++row)
    write(last[order[row]], warm_ups[order[row]], rows_of[order[row]], row, width, p.devices, shape, starts, owner,
          device_at, recompute, in_flight, rows, seconds);
  return count;
} catch (const std::bad_alloc&) {
  return -1;
}

// Return the seconds of the step of one layout, with all micro-batches simulated, and with contention if the problem
// has it; at least kUnfit where the layout does not fit.
double dapple_step(const Problem* problem, int width, const int32_t* shape, const int32_t* starts,
                     const int32_t* owner, const int32_t* device_at, const uint8_t* recompute, int32_t* in_flight) {
  Evaluator evaluator(*problem);
  const Layout l = read(width, problem->devices, shape, starts, owner, device_at, recompute);
  const Step alone = evaluator.alone(l, kInfinity, true);
  for (size_t s = 0; s < evaluator.warm_up().size(); ++s) in_flight[s] = evaluator.warm_up()[s];
  return problem->contention ? evaluator.shared(l, alone, kInfinity, true).seconds : alone.seconds;
}

// Cut a chain of blocks into stages: see partition.h.
void dapple_partition(int blocks, int64_t count, int sum, int latest, double limit, const double* seconds,
                      const double* boundary, const double* parameters, const uint8_t* splittable,
                      const int32_t* state, const int32_t* before, const int32_t* row, const double* link,
                      const double* ring, const uint8_t* alike, double* best, int32_t* way, int32_t* first) {
  const ChainOfBlocks chain{blocks, seconds, boundary, parameters, splittable};
  partition(chain, Ways{count, state, before, row, link, ring, alike}, sum, latest, limit, best, way, first);
}

// Cut stages so that their costs and those of their workers' other stages are even: see partition.h.
void dapple_least_squares(int blocks, int stages, const double* sums, const double* more_sums, const double* factors,
                          const double* beside, int64_t* starts) {
  least_squares(blocks, stages, sums, more_sums, factors, beside, starts);
}

// Return AutoPipe's iteration time of a pipeline, and write its master stage.
double dapple_one_forward_one_backward(int stages, int64_t micro_batches, const double* forward,
                                       const double* backward, double comm, int32_t* master) {
  OneForwardOneBackward pipeline(stages, micro_batches);
  const double seconds = pipeline.run(forward, backward, comm);
  *master = pipeline.master_stage();
  return seconds;
}

// Measure the transfers between placements of stages, where all replicas of a stage have equally many rows. The
// transitions of placement p are those from `first`[p] to `first`[p + 1], each to a placement in `following`. The
// servers of its devices are those from `offsets`[p] to `offsets`[p + 1].
void dapple_transfers(int count, const int64_t* first, const int64_t* following, const int64_t* offsets,
                      const int64_t* servers, int server_count, const double* inside, const double* inside_latency,
                      double interface_, double interface_latency, const double* own, const double* own_latency,
                      int has_own, double* latency, double* per_byte) {
  Transfer transfer({server_count, inside, inside_latency, interface_, interface_latency, own, own_latency,
                     has_own != 0});
  std::vector<int64_t> cuts(offsets[count] + 1);
  for (size_t i = 0; i < cuts.size(); ++i) cuts[i] = static_cast<int64_t>(i);
  for (int p = 0; p < count; ++p) {
    for (int64_t k = first[p]; k < first[p + 1]; ++k) {
      const int64_t q = following[k];
      const auto sender = [&](int i) { return static_cast<int>(servers[offsets[p] + i]); };
      const auto receiver = [&](int j) { return static_cast<int>(servers[offsets[q] + j]); };
      transfer.measure(static_cast<int>(offsets[p + 1] - offsets[p]), sender, cuts.data(),
                       static_cast<int>(offsets[q + 1] - offsets[q]), receiver, cuts.data());
      latency[k] = transfer.latency, per_byte[k] = transfer.per_byte;
    }
  }
}

// Search by DAPPLE's formulas; return how many plans there are, at most `results`; -1 where memory is lacking. `stages`
// [results]: the number of stages of each plan. `starts` and `placements` [results, blocks]: their first blocks and
// placements.
int dapple_formula_search(const CostTables* tables, int64_t width, double ceiling, int results, int require_warm_up,
                          double* latencies, int32_t* stages, int32_t* starts, int32_t* placements,
                          const volatile uint8_t* stop) try {
  FormulaSearch search(*tables, width, ceiling, results, require_warm_up);
  const auto plans = search.run(stop);
  for (size_t i = 0; i < plans.size(); ++i) {
    latencies[i] = plans[i].latency, stages[i] = static_cast<int32_t>(plans[i].starts.size());
    std::copy(plans[i].starts.begin(), plans[i].starts.end(), starts + i * tables->blocks);
    std::copy(plans[i].placements.begin(), plans[i].placements.end(), placements + i * tables->blocks);
  }
  return static_cast<int>(plans.size());
} catch (const std::bad_alloc&) {
  return -1;
}

// Improve an order in place: see order_moves.h. Seconds are those of each stage, which has one AllReduce, after its
// last gradients.
double dapple_improve(int stages, int workers, int64_t micro_batches, int64_t length, int64_t* actions,
                      const int64_t* worker_of, const double* forward, const double* backward, const double* weights,
                      const double* send_forward, const double* send_backward, const double* exposed,
                      const double* stash, const double* room, int64_t moves, const volatile uint8_t* stop) try {
  Order order;
  order.workers = workers, order.stages = stages, order.micro_batches = micro_batches, order.length = length;
  order.actions.assign(actions, actions + workers * length);
  order.worker_of.assign(worker_of, worker_of + stages);
  Seconds seconds;
  seconds.forward = forward, seconds.backward = backward, seconds.weights = weights;
  seconds.send_forward = send_forward, seconds.send_backward = send_backward;
  Rings rings;
  rings.exposed.assign(exposed, exposed + stages);
  for (const double ring : rings.exposed) rings.of_stage.push_back({{0, ring}});
  const double found = OrderMoves(order, seconds, rings, stash, room).run(moves, stop);
  std::copy(order.actions.begin(), order.actions.end(), actions);
  return found;
} catch (const std::bad_alloc&) {
  return -1;
}

// Execute an order; return the end of the step. `flow_first`: null if nothing shares an interface. `times`: 10 arrays
// [S, M], start and end in turn of each kind of event in `Times`; null if they are not wanted. `rings_end` [S]: the end
// of the last ring of each stage. `done`: the number of actions that ran.
double dapple_run(int stages, int workers, int64_t micro_batches, int64_t length, const int64_t* actions,
                  const int64_t* worker_of, int64_t columns, const double* forward, const double* backward,
                  const double* weights, const double* send_forward, const double* send_backward,
                  const uint8_t* forward_together, const uint8_t* backward_together, const int64_t* ring_first,
                  const double* ring_before, const double* ring_seconds, const double* exposed, int directions,
                  const int64_t* flow_first, const int64_t* flow_direction, const double* flow_demand,
                  const double* flow_latency, const int64_t* near_first, const int64_t* near, double ceiling,
                  double* times, double* rings_end, int64_t* done) try {
  Order order;
  order.workers = workers, order.stages = stages, order.micro_batches = micro_batches, order.length = length;
  order.actions.assign(actions, actions + workers * length);
  order.worker_of.assign(worker_of, worker_of + stages);
  Seconds seconds;
  seconds.columns = columns, seconds.forward = forward, seconds.backward = backward, seconds.weights = weights;
  seconds.send_forward = send_forward, seconds.send_backward = send_backward;
  seconds.forward_together = forward_together, seconds.backward_together = backward_together;
  Rings rings;
  rings.of_stage.resize(stages);
  rings.exposed.assign(exposed, exposed + stages);
  for (int s = 0; s < stages; ++s)
    for (int64_t r = ring_first[s]; r < ring_first[s + 1]; ++r)
      rings.of_stage[s].push_back({ring_before[r], ring_seconds[r]});
  Flows flows;
  flows.directions = directions;
  if (directions) {
    flows.uses.resize(3 * stages), flows.near.resize(3 * stages);
    flows.latency.assign(flow_latency, flow_latency + 3 * stages);
    for (int flow = 0; flow < 3 * stages; ++flow) {
      for (int64_t use = flow_first[flow]; use < flow_first[flow + 1]; ++use)
        flows.uses[flow].push_back({static_cast<int>(flow_direction[use]), flow_demand[use]});
      for (int64_t i = near_first[flow]; i < near_first[flow + 1]; ++i)
        flows.near[flow].push_back(static_cast<int>(near[i]));
    }
  }
  const int64_t cells = stages * micro_batches;
  const auto array = [&](int index) { return times + index * cells; };
  Times recorded;
  for (int i = 0; i < 3; ++i) recorded.start[i] = array(2 * i), recorded.end[i] = array(2 * i + 1);
  for (int i = 0; i < 2; ++i) recorded.start_send[i] = array(6 + 2 * i), recorded.end_send[i] = array(7 + 2 * i);
  Engine engine;
  const Flows* shared = directions ? &flows : nullptr;
  const double end = engine.run(order, seconds, shared, rings, ceiling, times ? &recorded : nullptr);
  std::copy(engine.ring_end().begin(), engine.ring_end().end(), rings_end);
  *done = engine.done();
  return end;
} catch (const std::bad_alloc&) {
  return -1;
}
}
