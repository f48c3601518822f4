// The search by formulas 1 to 3 of DAPPLE: dynamic programming over states (blocks planned, placement of the last
// stage). The placement says which devices are in use, so it stands for m and g of T_PL(j, m, g) in section IV.C.
//
// A *label* is a partial plan. The paper keeps one for each state; here a state keeps its `width` labels of least
// latency by formula 5 (all remaining blocks as one stage). The bound of a label never exceeds the latency of a plan
// that begins with the label. A label whose bound reaches the ceiling is left out. A partial plan cannot know its pivot
// stage Q, but it bounds the latency L of formulas 1 and 2 for every Q that it may get: with Q = s, L is at least (sum
// of F + B of stages 0 to s) + (M - 1)(F_s + B_s). Formula 3 goes from the last stage to the first, and a stage takes
// over from Q if its steady phase is longer than that of Q and the F + B between them. So a stage is pivot only if its
// steady phase reaches the *pivot threshold* of the stages before it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

namespace dapple {

// `CostTables` of dapple_tf/planner/search/formula_search.py: N blocks, P placements, R replica counts, E transitions.
struct CostTables {
  int32_t blocks, placements;
  int64_t micro_batches, micro_batch_size;
  double memory, fixed_factor, shared_factor;
  uint8_t recompute, overlap;
  const double *forward, *backward, *least_remaining, *parameters;
  const int64_t* trained;
  const double *stash, *working, *boundary;
  const uint8_t* splittable;
  const int64_t *replicas, *seconds_row;
  const double *ring_latency, *ring_per_byte, *exposed;
  const int64_t *exposed_row, *devices_left, *first_transition, *next_placement;
  const uint8_t* same_replicas;
  const int64_t* rest_transition;
  const double *transfer_latency, *transfer_per_byte;
};

// The pipeline latency by formulas 1 and 2, with the pivot of formula 3. The arrays have stages and the networks
// between them in turn; `pipeline_latency` of dapple.py is the same in Python.
inline double pipeline_latency(const double* forward, const double* backward, const double* allreduce, int count,
                               int64_t micro_batches) {
  int pivot = count - 1;
  double steady = (micro_batches - 1) * (forward[pivot] + backward[pivot]), between = 0;
  for (int stage = count - 2; stage >= 0; --stage) {
    const double both = forward[stage] + backward[stage];
    if ((micro_batches - 1) * both > (steady + between) * (1 + 1e-12)) {
      pivot = stage, steady = (micro_batches - 1) * both, between = 0;
    } else {
      between += both;
    }
  }
  double warm_up = 0, ending = 0, backwards = 0;
  for (int stage = 0; stage <= pivot; ++stage) warm_up += forward[stage];
  steady = (micro_batches - 1) * (forward[pivot] + backward[pivot]);
  for (int stage = pivot; stage >= 0; --stage) {
    backwards += backward[stage];
    ending = std::max(ending, allreduce[stage] + backwards);
  }
  backwards = backward[pivot];
  for (int stage = pivot + 1; stage < count; ++stage) {
    backwards += backward[stage];
    ending = std::max(ending, allreduce[stage] - backwards);
  }
  return warm_up + steady + ending;
}

class FormulaSearch {
 public:
  struct Plan {
    double latency;
    std::vector<int32_t> starts, placements;
  };

  FormulaSearch(const CostTables& tables, int64_t width, double ceiling, size_t results, bool require_warm_up)
      : t_(tables), width_(width), ceiling_(ceiling), results_(results), require_warm_up_(require_warm_up) {
    const int64_t states = std::max(0, t_.blocks - 1) * int64_t{t_.placements};
    counts_.assign(states, 0), labels_.resize(states * width);
    for (auto* column : {&forwards_, &backwards_, &allreduces_}) column->assign(2 * t_.blocks + 1, 0);
  }

  // Return the plans of least latency on all devices. If `stop` was set meanwhile, the result must not be used.
  std::vector<Plan> run(const volatile uint8_t* stop) {
    extend(-1, 0, t_.placements);
    for (int planned = 1; planned < t_.blocks; ++planned) {
      for (int p = 0; p < t_.placements && !*stop; ++p) {
        const int64_t state = state_of(planned, p);
        for (int64_t k = 0; k < counts_[state]; ++k) extend(state * width_ + k, planned, p);
      }
    }
    std::vector<Plan> plans;
    for (const auto& [negative, label, placement, start] : heap_) plans.push_back(unwind(-negative, label, placement, start));
    return plans;
  }

 private:
  struct Label {
    int64_t parent = -1;  // the label without the last stage; -1: the empty plan
    int32_t first = 0;    // where the last stage begins
    double bound = 0, rank = 0;
    double round_trip = 0;       // F + B of all stages and networks so far
    double pivot_threshold = 0;  // the least steady phase with which a later stage becomes pivot
    double forward = 0, backward = 0, allreduce = 0, transfer = 0;  // of the last stage; transfer: of its input
  };
  struct Stage {
    double forward, backward, exposed;
  };
  using Complete = std::tuple<double, int64_t, int32_t, int32_t>;  // -latency, label, placement and first block

  // Bounds add up the same seconds in another order than formulas 1 and 2. So they are lowered, by more than the
  // rounding errors of such sums.
  static constexpr double kRounding = 1 - 1e-12;

  int64_t state_of(int planned, int p) const { return (planned - 1) * int64_t{t_.placements} + p; }
  int32_t placement_of(int64_t label) const { return static_cast<int32_t>(label / width_ % t_.placements); }

  double sum(const double* rows, int64_t row, int first, int end) const {
    const double* of = rows + row * (t_.blocks + 1);
    return of[end] - of[first];
  }

  double transfer_seconds(int64_t transition, int start) const {  // 0 for the first stage
    return t_.transfer_latency[transition] + t_.transfer_per_byte[transition] * t_.boundary[start];
  }

  double exposed_seconds(int first, int end, int p) const {
    if (t_.overlap) return t_.exposed[(t_.exposed_row[p] * t_.blocks + first) * (t_.blocks + 1) + end];
    const double bytes = t_.parameters[end] - t_.parameters[first];
    return t_.trained[end] > t_.trained[first] ? t_.ring_latency[p] + t_.ring_per_byte[p] * bytes : 0.0;
  }

  Stage stage_of(int first, int end, int p) const {
    const int64_t row = t_.seconds_row[p];
    return {sum(t_.forward, row, first, end), sum(t_.backward, row, first, end), exposed_seconds(first, end, p)};
  }

  double stash_bytes(int first, int end) const {
    return t_.recompute ? t_.boundary[first] : t_.stash[end] - t_.stash[first];
  }

  // Return whether the memory of a replica holds this number of micro-batches in flight, one of which is computed.
  // `largest`: the largest working set of the stage's blocks.
  bool holds(int first, int end, int p, double largest, double in_flight) const {
    const double work = largest + (t_.recompute ? t_.stash[end] - t_.stash[first] : 0.0);
    const double held = in_flight * stash_bytes(first, end), replicas = static_cast<double>(t_.replicas[p]);
    const double fixed = (t_.parameters[end] - t_.parameters[first]) * (t_.fixed_factor + t_.shared_factor / replicas);
    return fixed + (work + held) / replicas <= t_.memory;
  }

  bool can_follow(int64_t transition, int start) const {
    return t_.replicas[t_.next_placement[transition]] <= t_.micro_batch_size &&
           (t_.splittable[start] || t_.same_replicas[transition]);
  }

  // Extend a label, whose last stage is on placement p, by every stage that can follow.
  void extend(int64_t at, int planned, int p) {
    const Label label = at < 0 ? Label{} : labels_[at];
    if (label.bound >= ceiling_) return;
    const auto steadily = [&](double seconds) { return (t_.micro_batches - 1) * seconds; };
    for (int64_t transition = t_.first_transition[p]; transition < t_.first_transition[p + 1]; ++transition) {
      if (!can_follow(transition, planned)) continue;
      const auto q = static_cast<int32_t>(t_.next_placement[transition]);
      // One more network stage, whose F and B are `transfer` each (section IV.A).
      const double transfer = transfer_seconds(transition, planned), network = steadily(2 * transfer);
      const double round_trip = label.round_trip + 2 * transfer;
      const double threshold = std::max(network, label.pivot_threshold - 2 * transfer);
      double bound = label.bound;
      if (network >= label.pivot_threshold) bound = std::max(bound, (round_trip + network) * kRounding);
      if (bound >= ceiling_) continue;
      double largest = 0;
      for (int end = planned + 1; end <= t_.blocks; ++end) {
        largest = std::max(largest, t_.working[end - 1]);
        const Stage stage = stage_of(planned, end, q);
        const double both = stage.forward + stage.backward, steady = steadily(both);
        if ((steady >= threshold && round_trip + steady >= ceiling_) || !holds(planned, end, q, largest, 1))
          break;  // with more blocks the stage needs even more memory and time
        if ((end < t_.blocks) != (t_.devices_left[q] > 0)) continue;
        Label next;
        next.round_trip = round_trip + stage.forward + stage.backward;
        next.pivot_threshold = std::max(steady, threshold - stage.forward - stage.backward);
        // The busiest later stage takes at least these seconds: all remaining blocks, divided among the unused devices.
        const double later = t_.least_remaining[end] / std::max<int64_t>(t_.devices_left[q], 1);
        double least = steady >= threshold ? next.round_trip + steady : 0.0;
        if (steadily(later) >= next.pivot_threshold) least = std::max(least, next.round_trip + steadily(later));
        if (t_.micro_batches == 1) least = std::max(least, next.round_trip + later);  // the last stage stays pivot
        next.bound = std::max(bound, least * kRounding);
        if (next.bound >= ceiling_) continue;
        if (end == t_.blocks) {
          if (!require_warm_up_ || holds_warm_up(at, planned, q)) complete(at, transfer, stage, q, planned);
          continue;
        }
        next.parent = at, next.first = planned, next.transfer = transfer;
        next.forward = stage.forward, next.backward = stage.backward, next.allreduce = stage.exposed;
        keep(next, state_of(end, q), stage, end, q);
      }
    }
  }

  // Keep a label if its state has room, or one of a worse rank.
  void keep(Label& label, int64_t state, const Stage& stage, int end, int32_t q) {
    Label* slot = &labels_[state * width_];
    const bool full = counts_[state] == width_;
    if (full) {
      for (Label* other = slot; other < &labels_[state * width_] + width_; ++other)
        if (other->rank > slot->rank) slot = other;
    } else {
      slot += counts_[state];
    }
    if (full && label.bound >= slot->rank) return;
    label.rank = latency_with_rest(label.parent, label.transfer, stage, end, q);
    if (full && label.rank >= slot->rank) return;
    counts_[state] += !full;
    *slot = label;
  }

  // Keep a complete plan if it is one of the best; then the worst of as many as are wanted is the new ceiling.
  void complete(int64_t label, double transfer, const Stage& stage, int32_t q, int planned) {
    const double latency = latency_with_rest(label, transfer, stage, t_.blocks, q);
    if (latency >= ceiling_) return;
    heap_.emplace_back(-latency, label, q, planned);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    if (heap_.size() <= results_) return;
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
    ceiling_ = std::min(ceiling_, -std::get<0>(heap_.front()));
  }

  // Return formula 5: the latency of the label's stages, the new stage, and the blocks from `end` on as the last stage.
  double latency_with_rest(int64_t label, double transfer, const Stage& stage, int end, int q) {
    int column = static_cast<int>(forwards_.size());
    const auto put = [&](double forward, double backward, double allreduce) {
      --column;
      forwards_[column] = forward, backwards_[column] = backward, allreduces_[column] = allreduce;
    };
    if (end < t_.blocks) {
      const int64_t transition = t_.rest_transition[q];
      const Stage rest = stage_of(end, t_.blocks, static_cast<int>(t_.next_placement[transition]));
      const double move = transfer_seconds(transition, end);
      put(rest.forward, rest.backward, rest.exposed);
      put(move, move, 0);
    }
    put(stage.forward, stage.backward, stage.exposed);
    for (; label >= 0; label = labels_[label].parent) {
      put(transfer, transfer, 0);
      put(labels_[label].forward, labels_[label].backward, labels_[label].allreduce);
      transfer = labels_[label].transfer;
    }
    const int count = static_cast<int>(forwards_.size()) - column;
    return pipeline_latency(&forwards_[column], &backwards_[column], &allreduces_[column], count, t_.micro_batches);
  }

  // Return whether each stage i of a complete plan can hold min(S - i, M) micro-batches (policy A, section V.C).
  // `label`: the plan without its last stage, which begins at block `first` on placement p.
  bool holds_warm_up(int64_t label, int first, int p) const {
    int end = t_.blocks;
    for (int64_t warm_up = 1;; ++warm_up) {
      const double largest = *std::max_element(t_.working + first, t_.working + end);
      if (!holds(first, end, p, largest, static_cast<double>(std::min(warm_up, t_.micro_batches)))) return false;
      if (label < 0) return true;
      end = first, first = labels_[label].first, p = placement_of(label);
      label = labels_[label].parent;
    }
  }

  Plan unwind(double latency, int64_t label, int32_t placement, int32_t start) const {
    Plan plan{latency, {start}, {placement}};
    for (; label >= 0; label = labels_[label].parent) {
      plan.starts.push_back(labels_[label].first), plan.placements.push_back(placement_of(label));
    }
    std::reverse(plan.starts.begin(), plan.starts.end());
    std::reverse(plan.placements.begin(), plan.placements.end());
    return plan;
  }

  const CostTables& t_;
  int64_t width_;
  double ceiling_;
  size_t results_;
  bool require_warm_up_;
  std::vector<int64_t> counts_;  // [states] labels in use
  std::vector<Label> labels_;    // [states, width]
  std::vector<Complete> heap_;
  std::vector<double> forwards_, backwards_, allreduces_;
};

}  // namespace dapple
