// Stages found by dynamic programming, from which the search starts.
#pragma once

#include "costs.h"

namespace dapple {

// Lists of devices; a stage takes consecutive devices of one of them.
using Pools = std::vector<std::vector<int>>;

// Plans the stages of one micro-batch size. A limit on the seconds of a stage is given (Alpa, section 5.2, equation
// 3). Each stage has consecutive devices of a pool. Of all stages within the limit those are taken whose forwards,
// backwards and transfers together take the fewest seconds. The limit rises until longer stages cannot make a shorter
// step. Rows, rings, interfaces and memory are only estimated.
class StagePlanner {
 public:
  // `cuts`: the blocks with which stages may begin, and the number of blocks. `work`: [blocks + 1] seconds of a row on
  // a device of the first kind, sums. `speed`: [kinds] relative to the first kind. `z`: the number of the micro-batch
  // size.
  StagePlanner(const Problem& problem, const std::vector<double>& work, const double* speed,
               const std::vector<int>& cuts, const Pools& pools, int z);
  // Return the layouts of all variants and limits.
  std::vector<Layout> plan();

 private:
  static constexpr int kMostStates = 300;  // of several pools; units get larger until there are no more
  static constexpr int kMostUnits = 64;    // of all pools
  static constexpr int kFineCells = 3000, kCoarseCells = 10000;  // up to which limits rise by 2% and by 4%
  static constexpr double kWorse = 1.5;  // limits end where M - 1 micro-batches take more than 1.5 best steps
  static constexpr double kRise = 1.1;   // the factor by which a limit rises where it need not rise in small steps
  static constexpr double kRecomputed = 4.0 / 3;  // a second forward, if backward takes twice as long as forward

  struct Variant {
    // The seconds of the AllReduces are added.
    bool rings;
    // The limit also holds for each transfer, and for all that a server's interface moves of one micro-batch.
    bool sends;
    // Later stages are shorter: the seconds of a stage for all micro-batches, plus those of the stages before it to
    // fill and to drain the pipeline, are at most M times the limit.
    bool tapers;
  };
  // The devices that a stage can have: `units` of a pool, from the unit `begin` on; and what its costs depend on.
  struct Span {
    int pool, begin, units;
    double seconds;             // of a micro-batch on its busiest device, for each second of `work`
    double stash, fixed, ring;  // bytes of its busiest device, and seconds of its ring, for each byte
    double memory;              // bytes of its smallest device
  };
  // The transfer from one span to one that can follow it. The first device of each unit stands for all of them.
  struct Sending {
    double latency = kNever, per_byte = 0;
    bool by_interface = false;    // whether it uses network interfaces
    bool on_same_server = false;  // whether some server has devices of both spans
  };
  // The best stages up to a cut that use the units of a state.
  struct Entry {
    double seconds;  // of all these stages
    double moving;   // seconds in which the interfaces of the last stage's servers move their part, one way
    int from_cut, from_span, from_state;
    bool recompute;
  };

  void choose_units();
  void list_spans();
  void list_spans(int pool);
  double link(int x, int y) const;
  // Return how many units of a pool are used.
  int taken(int state, int pool) const { return state / strides_[pool] % (units_[pool] + 1); }
  std::vector<int> servers_of(const Span& span) const;
  std::vector<int64_t> cut_rows(int parts) const;
  const Sending& sending(int from, int to);
  int solve(double limit, const Variant& variant);
  void extend(int cut, int state, int to_span, double limit, const Variant& variant);
  void add_within(double limit, const Variant& variant, std::vector<Layout>& layouts);
  Layout layout_of(int end) const;

  const Problem& p_;
  const std::vector<double>& work_;
  const double* speed_;
  const std::vector<int>& cuts_;
  const Pools& pools_;
  const int z_, n_, count_;  // n_: the number of the last cut; count_: of pools
  const double rows_, m_, scale_;
  // A state says how many units of each pool are used. A unit is one device or, where there are many devices, several
  // consecutive ones of a pool.
  int unit_ = 1, states_ = 0;
  std::vector<int> units_, strides_;
  std::vector<Span> spans_;
  std::vector<std::vector<std::vector<int>>> beginning_;  // the spans that begin with each unit of each pool
  double all_speed_ = 0;
  std::vector<double> seconds_, bytes_, stash_;  // sums up to each cut
  std::vector<double> sent_;                     // bytes that cross each cut
  std::vector<std::vector<Sending>> sendings_;
  Transfer transfer_;
  std::vector<Entry> best_;       // [cuts][states]
  double whole_ = 0;              // the seconds of all stages together in the last solution
  double least_ = kInfinity;      // the least estimated step of all stages so far
};

inline StagePlanner::StagePlanner(const Problem& problem, const std::vector<double>& work, const double* speed,
                                  const std::vector<int>& cuts, const Pools& pools, int z)
    : p_(problem),
      work_(work),
      speed_(speed),
      cuts_(cuts),
      pools_(pools),
      z_(z),
      n_(static_cast<int>(cuts.size()) - 1),
      count_(static_cast<int>(pools.size())),
      rows_(static_cast<double>(p_.size[z])),
      m_(static_cast<double>(p_.micro_batches[z])),
      scale_(rows_ / p_.batch),
      transfer_({p_.servers, p_.inside, p_.inside_latency, p_.interface_, p_.interface_latency, p_.own, p_.own_latency,
                 p_.own_links != 0}) {
  choose_units();
  list_spans();
  for (const int cut : cuts_) {
    seconds_.push_back(work_[cut]), bytes_.push_back(p_.parameters[cut]), stash_.push_back(p_.stash[cut]);
    sent_.push_back(p_.boundary[cut] * scale_);
  }
  sendings_.resize(spans_.size());
  best_.resize((n_ + 1) * states_);
}

inline void StagePlanner::choose_units() {
  unit_ = (p_.devices + kMostUnits - 1) / kMostUnits;
  units_.resize(count_), strides_.resize(count_);
  for (;; ++unit_) {
    states_ = 1;
    for (int k = 0; k < count_; ++k) {
      strides_[k] = states_, units_[k] = static_cast<int>(pools_[k].size()) / unit_;
      states_ *= units_[k] + 1;
    }
    if (count_ == 1 || states_ <= kMostStates) break;
  }
}

inline void StagePlanner::list_spans() {
  beginning_.resize(count_);
  for (int k = 0; k < count_; ++k) list_spans(k);
}

inline void StagePlanner::list_spans(int k) {
  const auto& order = pools_[k];
  const auto server = [&](int d) { return d < units_[k] * unit_ ? p_.server[order[d]] : -1; };
  beginning_[k].resize(units_[k] + 1);
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
      // Of equal devices a number is tried only if the busiest one gets clearly fewer rows than with the number before;
      // of unequal ones all numbers up to 8, then only some.
      const bool alike = p_.kinds == 1 && p_.whole_rows;
      if (alike ? most_rows > 0.95 * rows_before : size > 8 && size % (size / 4) != 0) continue;
      rows_before = most_rows;
      // The rows of a micro-batch over those of the busiest device, or the speed of all devices.
      const double divided = p_.kinds > 1 ? speed : p_.whole_rows ? rows_ / most_rows : r;
      const int x = server(a * unit_), y = server((a + size) * unit_ - 1);
      const double ring = 2 * (r - 1) / r * std::max(slowest, link(y, x));
      beginning_[k][a].push_back(static_cast<int>(spans_.size()));
      spans_.push_back({k, a, size, rows_ / divided, scale_ / divided, p_.fixed_factor + p_.shared_factor / r, ring,
                        least_memory});
    }
  }
}

// Return the seconds of a byte from a device of server x to another one of server y.
inline double StagePlanner::link(int x, int y) const {
  const bool own = p_.own_links && x != y && p_.own[x * p_.servers + y] > 0;
  return own ? p_.own[x * p_.servers + y] : x == y ? p_.inside[x] : p_.interface_;
}

// Return the servers of a span's units, in the order in which they get rows.
inline std::vector<int> StagePlanner::servers_of(const Span& span) const {
  std::vector<int> found;
  for (int i = 0; i < span.units; ++i) found.push_back(p_.server[pools_[span.pool][(span.begin + i) * unit_]]);
  std::sort(found.begin(), found.end());
  return found;
}

inline std::vector<int64_t> StagePlanner::cut_rows(int parts) const {
  std::vector<int64_t> found;
  for (int i = 0; i <= parts; ++i) found.push_back(p_.whole_rows && unit_ == 1 ? p_.size[z_] * i / parts : i);
  return found;
}

// Return the transfer between two spans, which is measured when it is first needed.
inline const StagePlanner::Sending& StagePlanner::sending(int from, int to) {
  const Span &sender = spans_[from], &receiver = spans_[to];
  // From one pool only the spans that begin where the sender ends can follow.
  const std::vector<int>& next = beginning_[0][count_ == 1 ? sender.begin + sender.units : 0];
  std::vector<Sending>& of_sender = sendings_[from];
  if (of_sender.empty()) of_sender.resize(count_ == 1 ? next.size() : spans_.size());
  Sending& found = of_sender[count_ == 1 ? to - next.front() : to];
  if (!std::isnan(found.latency)) return found;
  const std::vector<int> senders = servers_of(sender), receivers = servers_of(receiver);
  transfer_.measure(sender.units, [&](int i) { return senders[i]; }, cut_rows(sender.units).data(), receiver.units,
                    [&](int i) { return receivers[i]; }, cut_rows(receiver.units).data());
  std::vector<int> common;
  std::set_intersection(senders.begin(), senders.end(), receivers.begin(), receivers.end(), std::back_inserter(common));
  return found = {transfer_.latency, transfer_.per_byte, !transfer_.touched.empty(), !common.empty()};
}

// Fill the table of the best stages within the limit; return the state in which they end, or -1 if there are none.
inline int StagePlanner::solve(double limit, const Variant& variant) {
  for (Entry& entry : best_) entry.seconds = kInfinity;
  best_[0] = {0, 0, 0, 0, 0, false};
  for (int cut = 0; cut < n_; ++cut) {
    if (!p_.splittable[cuts_[cut]] && p_.kinds > 1) continue;
    for (int state = 0; state < states_; ++state) {
      if (best_[cut * states_ + state].seconds == kInfinity) continue;
      for (int k = 0; k < count_; ++k)
        for (const int span : beginning_[k][taken(state, k)]) extend(cut, state, span, limit, variant);
    }
  }
  const auto last = best_.begin() + n_ * states_;
  const auto less = [](const Entry& a, const Entry& b) { return a.seconds < b.seconds; };
  const auto end = std::min_element(last, best_.end(), less);
  if (end->seconds == kInfinity) return -1;
  whole_ = end->seconds;
  return static_cast<int>(end - last);
}

// Add a stage on a span, with each number of layers within the limit, to the best stages up to a cut.
inline void StagePlanner::extend(int cut, int state, int to_span, double limit, const Variant& variant) {
  const Entry before = best_[cut * states_ + state];
  const Span& span = spans_[to_span];
  double in = 0, moving = 0;
  if (cut) {
    const Sending& sent = sending(before.from_span, to_span);
    in = sent.latency + sent_[cut] * sent.per_byte;
    const double by_interface = sent.by_interface ? in : 0;
    // The same interface moves what enters the stage before and what leaves it.
    const double moving_before = p_.contention ? before.moving : 0;
    if (variant.sends && (in > limit || (by_interface > 0 && moving_before + in > limit))) return;
    moving = by_interface + (sent.on_same_server ? moving_before : 0);
  }
  const double own = variant.tapers ? limit - (before.seconds + 2 * in) / m_ : limit;
  // The micro-batches that the stage computes before the first one comes back.
  const double in_flight = std::min(m_, std::max(1.0, std::ceil((whole_ - before.seconds) / limit)));
  const double inputs = sent_[cut] * span.stash / scale_;
  const int to_state = state + span.units * strides_[span.pool];
  for (int end = cut + 1; end <= n_; ++end) {
    const double seconds = (seconds_[end] - seconds_[cut]) * span.seconds, parameters = bytes_[end] - bytes_[cut];
    const double ring = span.ring * parameters;
    const double room = span.memory - parameters * span.fixed, held = (stash_[end] - stash_[cut]) * span.stash;
    const bool again = p_.may_recompute && held * in_flight > room;
    if (again ? held + inputs * in_flight > room : held > room && !p_.recompute_all) return;
    const double all_seconds = again ? seconds * kRecomputed : seconds;
    if (all_seconds + ring / m_ > own) return;
    const double found = before.seconds + all_seconds + 2 * in + (variant.rings ? ring : 0);
    Entry& to = best_[end * states_ + to_state];
    if (found < to.seconds) to = {found, moving, cut, to_span, state, again};
  }
}

// Add the layout of the best stages within the limit, if there are any with the number of workers that is asked for.
inline void StagePlanner::add_within(double limit, const Variant& variant, std::vector<Layout>& layouts) {
  const int end = solve(limit, variant);
  if (end < 0) return;
  if (variant.tapers) {
    least_ = std::min(least_, m_ * limit);
  } else if (variant.rings || p_.devices == 1) {
    least_ = std::min(least_, best_[n_ * states_ + end].seconds + (m_ - 1) * limit);
  }
  const Layout found = layout_of(n_ * states_ + end);
  if ((p_.workers && found.workers != p_.workers) || found.workers > std::min(p_.devices, p_.blocks)) return;
  layouts.push_back(found);
}

// Return the layout of the stages that end in an entry of the table.
inline Layout StagePlanner::layout_of(int end) const {
  std::vector<Entry> entries;  // of the stages, the last stage first
  for (int at = end; at > 0; at = entries.back().from_cut * states_ + entries.back().from_state)
    entries.push_back(best_[at]);
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
  const double equal_share = work_[p_.blocks] * rows_ / std::max(all_speed_, 1e-300), most = 2.0 * p_.devices;
  const int cells = n_ * states_;
  const double fine = m_ >= 16 && cells <= kFineCells ? 1.02 : cells <= kCoarseCells ? 1.04 : 1.1;
  for (const Variant& variant :
       {Variant{true, false, false}, {false, false, false}, {true, true, false}, {true, true, true}}) {
    if (variant.rings && p_.devices == 1) continue;
    whole_ = 0;
    double first = 1;  // nearly the least limit within which there are stages, as a multiple of `equal_share`
    while (first <= most && solve(equal_share * first, variant) < 0) first *= kRise;
    first = std::max(1.0, first / kRise);
    for (double factor = first; factor <= most && (m_ - 1) * equal_share * factor <= least_ * kWorse;) {
      add_within(equal_share * factor, variant, layouts);
      factor *= factor < 1.4 * first ? fine : factor < 2 * first ? kRise : 1.4;
    }
  }
  return layouts;
}

}  // namespace dapple
