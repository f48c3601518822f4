// Dynamic programming over the cuts and the devices of stages: makes layouts with which the search starts.
#pragma once

#include "costs.h"

namespace dapple {

// Pools are lists of devices. The devices of a stage are consecutive in one of the lists.
using Pools = std::vector<std::vector<int>>;

// Plans stages for one micro-batch size, as Alpa does (section 5.2, equation 3). A limit is given on the seconds that
// each stage needs for a micro-batch, with its part of the stage's AllReduce. Of all stages within the limit, dynamic
// programming finds those that need the fewest seconds in total for the forward, the backward and the transfers of one
// micro-batch. This is repeated with higher limits, until the limit alone makes the step clearly longer than the best
// one found. The costs are estimates: they do not divide rows exactly among unequal devices, and simplify AllReduces,
// contention, and memory.
class StagePlanner {
 public:
  // `cuts`: the blocks with which stages may begin, then the number of blocks. `row_seconds`: [blocks + 1] prefix sums
  // of the seconds that a device of the first kind needs for one row of each block. `speed`: [kinds] speed of a device
  // relative to the first kind. `z`: the index of the micro-batch size in Problem::size.
  StagePlanner(const Problem& problem, const std::vector<double>& row_seconds, const double* speed,
               const std::vector<int>& cuts, const Pools& pools, int z);
  // Return one layout for each variant of the costs and each limit for which there are stages.
  std::vector<Layout> plan();

 private:
  // Units are made larger until all pools together have at most kMostUnits of them, and until several pools have at
  // most kMostStates states. Devices of a pool that do not fill a unit stay idle.
  static constexpr int kMostStates = 300, kMostUnits = 64;
  // Up to 1.4 times the lowest limit with stages, each limit is higher than the one before by 2% if M is at least 16
  // and the table has at most kFineCells cells, by 4% if it has at most kCoarseCells, and else by 10%.
  static constexpr int kFineCells = 3000, kCoarseCells = 10000;
  static constexpr double kCoarseRise = 1.1;  // from 1.4 to 2 times the lowest limit; above, it rises by 1.4
  // The last limit is that with which M - 1 micro-batches take this many times as long as the best step.
  static constexpr double kMostOverBest = 1.5;
  // The seconds of a stage with re-computation over those without it: forward runs twice, and backward takes twice as
  // long as forward.
  static constexpr double kRecomputeFactor = 4.0 / 3;

  // Options of the cost that is minimised, and of what the limit is for. `plan` tries several combinations.
  struct Variant {
    // Whether the cost includes the seconds of each stage's AllReduce.
    bool adds_all_reduce;
    // Whether the limit is also for the seconds of each transfer of a micro-batch, and for the seconds in which a
    // server's network interface sends or receives for one micro-batch.
    bool limits_transfers;
    // Whether later stages must be shorter. The time of a stage is then its seconds for all M micro-batches, plus the
    // time in which the stages before it fill and drain the pipeline. It is at most M times the limit.
    bool shortens_later_stages;
  };
  // The devices that a stage can have: `units` consecutive units of a pool, from the unit `begin` on.
  struct Span {
    int pool, begin, units;
    double seconds;  // of a micro-batch on the busiest device, for each second that a row takes in `row_seconds`
    double stash;    // bytes on the busiest device, for each byte of the stash of the profile's batch
    double fixed;    // bytes on a device, for each byte of parameters
    double ring;     // seconds of the AllReduce, for each byte of parameters
    double memory;   // bytes of the device with the least memory
  };
  // The cost of the transfer from one span to a span that can follow it. The first device of each unit stands for the
  // whole unit. `latency` is kNever until the cost is computed.
  struct SpanTransfer {
    double latency = kNever, per_byte = 0;
    bool by_interface = false;    // whether it uses network interfaces
    bool on_same_server = false;  // whether some server has devices of both spans
  };
  // A cell of the table: the best stages for the blocks before a cut, on the units that a state says are used.
  struct Entry {
    double seconds;  // of one micro-batch on all these stages, with transfers and, if the variant says so, AllReduces
    double moving;   // seconds in which interfaces of the last stage's servers receive the inputs of stages
    int from_cut, from_span, from_state;  // the first cut of the last stage, its span, and the state before it
    bool recompute;                       // whether the last stage re-computes its activations
  };

  void choose_units();
  void list_spans();
  void list_spans(int pool);
  double link(int x, int y) const;
  // Return how many units of a pool a state uses. They are the first ones of the pool.
  int used_units(int state, int pool) const { return state / strides_[pool] % (units_[pool] + 1); }
  std::vector<int> servers_of(const Span& span) const;
  std::vector<int64_t> row_cuts(int parts) const;
  const SpanTransfer& span_transfer(int from, int to);
  int solve(double limit, const Variant& variant);
  void extend(int cut, int state, int to_span, double limit, const Variant& variant);
  void add_within(double limit, const Variant& variant, std::vector<Layout>& layouts);
  Layout layout_of(int end) const;

  const Problem& p_;
  const std::vector<double>& row_seconds_;
  const double* speed_;
  const std::vector<int>& cuts_;
  const Pools& pools_;
  const int z_, last_cut_, pool_count_;  // `last_cut_`: the index of the last cut, which is the end of the model
  const double rows_, m_, scale_;        // rows of a micro-batch; M; a micro-batch over the profile's batch
  // A state is the number of units of each pool that are used, as one index of the table. A unit is `unit_` consecutive
  // devices of a pool: one device, unless there are many.
  int unit_ = 1, states_ = 0;
  std::vector<int> units_, strides_;  // [pools] units of each pool, and what one of them adds to a state
  std::vector<Span> spans_;
  std::vector<std::vector<std::vector<int>>> spans_from_;  // [pools][units] the spans that begin with a unit
  double all_speed_ = 0;  // of all devices together
  std::vector<double> seconds_to_cut_, parameters_to_cut_, stash_to_cut_;  // [cuts] prefix sums: of a row, and bytes
  std::vector<double> bytes_over_cut_;  // [cuts] bytes of a micro-batch that cross the cut
  std::vector<std::vector<SpanTransfer>> span_transfers_;  // by the sending span
  Transfer transfer_;
  std::vector<Entry> table_;       // [cuts][states]
  double pipeline_seconds_ = 0;    // seconds of one micro-batch on all stages of the last solution
  double least_step_ = kInfinity;  // the shortest step that was estimated so far
};

inline StagePlanner::StagePlanner(const Problem& problem, const std::vector<double>& row_seconds, const double* speed,
                                  const std::vector<int>& cuts, const Pools& pools, int z)
    : p_(problem),
      row_seconds_(row_seconds),
      speed_(speed),
      cuts_(cuts),
      pools_(pools),
      z_(z),
      last_cut_(static_cast<int>(cuts.size()) - 1),
      pool_count_(static_cast<int>(pools.size())),
      rows_(static_cast<double>(p_.size[z])),
      m_(static_cast<double>(p_.micro_batches[z])),
      scale_(rows_ / p_.batch),
      transfer_({p_.servers, p_.inside, p_.inside_latency, p_.interface_, p_.interface_latency, p_.own, p_.own_latency,
                 p_.own_links != 0}) {
  choose_units();
  list_spans();
  for (const int cut : cuts_) {
    seconds_to_cut_.push_back(row_seconds_[cut]);
    parameters_to_cut_.push_back(p_.parameters[cut]), stash_to_cut_.push_back(p_.stash[cut]);
    bytes_over_cut_.push_back(p_.boundary[cut] * scale_);
  }
  span_transfers_.resize(spans_.size());
  table_.resize((last_cut_ + 1) * states_);
}

inline void StagePlanner::choose_units() {
  unit_ = (p_.devices + kMostUnits - 1) / kMostUnits;
  units_.resize(pool_count_), strides_.resize(pool_count_);
  for (;; ++unit_) {
    states_ = 1;
    for (int k = 0; k < pool_count_; ++k) {
      strides_[k] = states_, units_[k] = static_cast<int>(pools_[k].size()) / unit_;
      states_ *= units_[k] + 1;
    }
    if (pool_count_ == 1 || states_ <= kMostStates) break;
  }
}

inline void StagePlanner::list_spans() {
  spans_from_.resize(pool_count_);
  for (int k = 0; k < pool_count_; ++k) list_spans(k);
}

inline void StagePlanner::list_spans(int k) {
  const auto& order = pools_[k];
  const auto server = [&](int d) { return d < units_[k] * unit_ ? p_.server[order[d]] : -1; };
  spans_from_[k].resize(units_[k] + 1);
  for (const int d : order) all_speed_ += speed_[p_.kind[d]];
  for (int a = 0; a < units_[k]; ++a) {
    double least_memory = kInfinity, speed = 0, rows_before = kInfinity, slowest = 0;
    int seen = a * unit_;
    for (int size = 1; a + size <= units_[k]; ++size) {
      const double r = static_cast<double>(size) * unit_, most_rows = std::ceil(rows_ / r);
      if (r * p_.least_rows > rows_) break;
      for (; seen < (a + size) * unit_; ++seen) {
        least_memory = std::min(least_memory, p_.memory[p_.kind[order[seen]]]), speed += speed_[p_.kind[order[seen]]];
        if (seen > a * unit_) slowest = std::max(slowest, link(server(seen - 1), server(seen)));
      }
      // To save time, some sizes are left out. Of equal devices: a size with which the busiest device gets nearly as
      // many rows as with the last size that was listed. Of unequal devices: most sizes above 8.
      const bool alike = p_.kinds == 1 && p_.whole_rows;
      if (alike ? most_rows > 0.95 * rows_before : size > 8 && size % (size / 4) != 0) continue;
      rows_before = most_rows;
      // How many times as fast as one device the span is: the rows of a micro-batch over those of the busiest device,
      // or, with devices of several kinds, the sum of their speeds.
      const double divided = p_.kinds > 1 ? speed : p_.whole_rows ? rows_ / most_rows : r;
      const int x = server(a * unit_), y = server((a + size) * unit_ - 1);
      const double ring = 2 * (r - 1) / r * std::max(slowest, link(y, x));
      spans_from_[k][a].push_back(static_cast<int>(spans_.size()));
      spans_.push_back({k, a, size, rows_ / divided, scale_ / divided, p_.fixed_factor + p_.shared_factor / r, ring,
                        least_memory});
    }
  }
}

// Return the seconds per byte of the link between two devices, on the servers x and y.
inline double StagePlanner::link(int x, int y) const {
  const bool own = p_.own_links && x != y && p_.own[x * p_.servers + y] > 0;
  return own ? p_.own[x * p_.servers + y] : x == y ? p_.inside[x] : p_.interface_;
}

// Return the server of each unit of a span, in the order in which the units get the rows of a micro-batch.
inline std::vector<int> StagePlanner::servers_of(const Span& span) const {
  std::vector<int> found;
  for (int i = 0; i < span.units; ++i) found.push_back(p_.server[pools_[span.pool][(span.begin + i) * unit_]]);
  std::sort(found.begin(), found.end());
  return found;
}

// Return the numbers of rows before each of `parts` equal units and after the last one; if rows can be fractions, in
// units of one part.
inline std::vector<int64_t> StagePlanner::row_cuts(int parts) const {
  std::vector<int64_t> found;
  for (int i = 0; i <= parts; ++i) found.push_back(p_.whole_rows && unit_ == 1 ? p_.size[z_] * i / parts : i);
  return found;
}

// Return the cost of the transfer between two spans. It is computed when it is first needed.
inline const StagePlanner::SpanTransfer& StagePlanner::span_transfer(int from, int to) {
  const Span &sender = spans_[from], &receiver = spans_[to];
  // With a single pool, the next span begins where the sender ends, so costs are kept only for such spans.
  const std::vector<int>& next = spans_from_[0][pool_count_ == 1 ? sender.begin + sender.units : 0];
  std::vector<SpanTransfer>& of_sender = span_transfers_[from];
  if (of_sender.empty()) of_sender.resize(pool_count_ == 1 ? next.size() : spans_.size());
  SpanTransfer& found = of_sender[pool_count_ == 1 ? to - next.front() : to];
  if (!std::isnan(found.latency)) return found;
  const std::vector<int> senders = servers_of(sender), receivers = servers_of(receiver);
  transfer_.measure(sender.units, [&](int i) { return senders[i]; }, row_cuts(sender.units).data(), receiver.units,
                    [&](int i) { return receivers[i]; }, row_cuts(receiver.units).data());
  std::vector<int> common;
  std::set_intersection(senders.begin(), senders.end(), receivers.begin(), receivers.end(), std::back_inserter(common));
  return found = {transfer_.latency, transfer_.per_byte, !transfer_.touched.empty(), !common.empty()};
}

// Fill the table for a limit. Return the state of the best stages for all blocks, or -1 if there are no stages within
// the limit.
inline int StagePlanner::solve(double limit, const Variant& variant) {
  for (Entry& entry : table_) entry.seconds = kInfinity;
  table_[0] = {0, 0, 0, 0, 0, false};
  for (int cut = 0; cut < last_cut_; ++cut) {
    if (!p_.splittable[cuts_[cut]] && p_.kinds > 1) continue;
    for (int state = 0; state < states_; ++state) {
      if (table_[cut * states_ + state].seconds == kInfinity) continue;
      for (int k = 0; k < pool_count_; ++k)
        for (const int span : spans_from_[k][used_units(state, k)]) extend(cut, state, span, limit, variant);
    }
  }
  const auto last = table_.begin() + last_cut_ * states_;
  const auto less = [](const Entry& a, const Entry& b) { return a.seconds < b.seconds; };
  const auto end = std::min_element(last, table_.end(), less);
  if (end->seconds == kInfinity) return -1;
  pipeline_seconds_ = end->seconds;
  return static_cast<int>(end - last);
}

// Append a stage that begins at `cut` and runs on the span `to_span` to the best stages before it, which use the units
// of `state`. Try each end with which the stage is within the limit, and write the stages into the table where they are
// better than those found before.
inline void StagePlanner::extend(int cut, int state, int to_span, double limit, const Variant& variant) {
  const Entry before = table_[cut * states_ + state];
  const Span& span = spans_[to_span];
  double in = 0, moving = 0;  // `in`: seconds to receive the input
  if (cut) {
    const SpanTransfer& sent = span_transfer(before.from_span, to_span);
    in = sent.latency + bytes_over_cut_[cut] * sent.per_byte;
    const double by_interface = sent.by_interface ? in : 0;
    // For each micro-batch, an interface of the stage before receives its input and the gradient of its output.
    const double moving_before = p_.contention ? before.moving : 0;
    if (variant.limits_transfers && (in > limit || (by_interface > 0 && moving_before + in > limit))) return;
    moving = by_interface + (sent.on_same_server ? moving_before : 0);
  }
  const double own_limit = variant.shortens_later_stages ? limit - (before.seconds + 2 * in) / m_ : limit;
  // The micro-batches whose forwards the stage has run when the first gradient arrives.
  const double in_flight = std::min(m_, std::max(1.0, std::ceil((pipeline_seconds_ - before.seconds) / limit)));
  const double inputs = bytes_over_cut_[cut] * span.stash / scale_;
  const int to_state = state + span.units * strides_[span.pool];
  for (int end = cut + 1; end <= last_cut_; ++end) {
    const double seconds = (seconds_to_cut_[end] - seconds_to_cut_[cut]) * span.seconds;
    const double parameters = parameters_to_cut_[end] - parameters_to_cut_[cut], ring = span.ring * parameters;
    const double room = span.memory - parameters * span.fixed;
    const double held = (stash_to_cut_[end] - stash_to_cut_[cut]) * span.stash;
    const bool recompute = p_.may_recompute && held * in_flight > room;
    if (recompute ? held + inputs * in_flight > room : held > room && !p_.recompute_all) return;
    const double all_seconds = recompute ? seconds * kRecomputeFactor : seconds;
    if (all_seconds + ring / m_ > own_limit) return;
    const double found = before.seconds + all_seconds + 2 * in + (variant.adds_all_reduce ? ring : 0);
    Entry& to = table_[end * states_ + to_state];
    if (found < to.seconds) to = {found, moving, cut, to_span, state, recompute};
  }
}

// Append the layout of the best stages within the limit to `layouts`. Append nothing if there are no such stages, or if
// their number is not the one that the problem asks for.
inline void StagePlanner::add_within(double limit, const Variant& variant, std::vector<Layout>& layouts) {
  const int end = solve(limit, variant);
  if (end < 0) return;
  if (variant.shortens_later_stages) {
    least_step_ = std::min(least_step_, m_ * limit);
  } else if (variant.adds_all_reduce || p_.devices == 1) {
    least_step_ = std::min(least_step_, table_[last_cut_ * states_ + end].seconds + (m_ - 1) * limit);
  }
  const Layout found = layout_of(last_cut_ * states_ + end);
  if ((p_.workers && found.workers != p_.workers) || found.workers > std::min(p_.devices, p_.blocks)) return;
  layouts.push_back(found);
}

// Return the layout whose last stage is in the cell `end` of the table. Devices that no stage uses are idle.
inline Layout StagePlanner::layout_of(int end) const {
  std::vector<Entry> entries;  // one for each stage, the last stage first
  for (int at = end; at > 0; at = entries.back().from_cut * states_ + entries.back().from_state)
    entries.push_back(table_[at]);
  Layout l = empty_layout(p_, z_, static_cast<int>(entries.size()), 1);
  std::vector<uint8_t> used(p_.devices, 0);
  int at = 0;
  for (int s = 0; s < l.workers; ++s) {
    const Entry& entry = entries[l.workers - 1 - s];
    const Span& span = spans_[entry.from_span];
    const auto first = pools_[span.pool].begin() + span.begin * unit_;
    std::vector<int> own(first, first + span.units * unit_);
    std::sort(own.begin(), own.end());  // so that the devices of a server get consecutive rows
    l.starts[s] = cuts_[entry.from_cut], l.recompute[s] = entry.recompute;
    for (const int d : own) l.device_at[at] = d, l.owner[at++] = s, used[d] = 1;
  }
  for (const auto& order : pools_)
    for (const int d : order)
      if (!used[d]) l.device_at[at] = d, l.owner[at++] = kIdleDevice;
  return l;
}

inline std::vector<Layout> StagePlanner::plan() {
  std::vector<Layout> layouts;
  const double equal_share = row_seconds_[p_.blocks] * rows_ / std::max(all_speed_, 1e-300), most = 2.0 * p_.devices;
  const int cells = last_cut_ * states_;
  const double fine = m_ >= 16 && cells <= kFineCells ? 1.02 : cells <= kCoarseCells ? 1.04 : 1.1;
  for (const Variant& variant :
       {Variant{true, false, false}, {false, false, false}, {true, true, false}, {true, true, true}}) {
    if (variant.adds_all_reduce && p_.devices == 1) continue;
    pipeline_seconds_ = 0;
    // Limits are multiples of `equal_share`. Find roughly the lowest multiple for which there are stages.
    double first = 1;
    while (first <= most && solve(equal_share * first, variant) < 0) first *= kCoarseRise;
    first = std::max(1.0, first / kCoarseRise);
    for (double factor = first; factor <= most && (m_ - 1) * equal_share * factor <= least_step_ * kMostOverBest;) {
      add_within(equal_share * factor, variant, layouts);
      factor *= factor < 1.4 * first ? fine : factor < 2 * first ? kCoarseRise : 1.4;
    }
  }
  return layouts;
}

}  // namespace dapple
