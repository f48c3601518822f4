// Local search over orders: moves of single actions within their workers (dapple_tf/simulator/order_search.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "engine.h"

namespace dapple {

class OrderMoves {
 public:
  // `stash`: bytes of a micro-batch on each stage. `room`: the bytes of stashes that each worker has memory for.
  OrderMoves(Order& order, const Seconds& seconds, const Rings& rings, const double* stash, const double* room)
      : order_(order), seconds_(seconds), rings_(rings), stash_(stash), room_(room), random_(0) {}

  // Move single actions at random, and undo each move that makes the step longer; return the seconds of the step. The
  // actions of a stage and kind stay in micro-batch order. `stop`: ends the search after the present move.
  double run(int64_t moves, const volatile uint8_t* stop) {
    std::vector<int64_t> lengths(order_.workers, 0);
    for (int w = 0; w < order_.workers; ++w)
      while (lengths[w] < order_.length && row(w)[lengths[w]] != kNone) ++lengths[w];
    double best = engine_.run(order_, seconds_, nullptr, rings_, kInfinity);
    for (int64_t move = 0; move < moves && !*stop; ++move) {
      const int w = static_cast<int>(draw(order_.workers));
      const int64_t source = draw(lengths[w]);
      const int64_t distance = 1 + static_cast<int64_t>(-std::log(1.0 - uniform()) * 4.0);
      const int64_t target = uniform() < 0.5 ? source + distance : source - distance;
      if (target < 0 || target >= lengths[w] || passes_another(w, source, target)) continue;
      shift(w, source, target);
      double found = kInfinity;
      if (peak(w) <= room_[w]) found = engine_.run(order_, seconds_, nullptr, rings_, best * (1 + 1e-12));
      if (found <= best) {
        best = found;
      } else {
        shift(w, target, source);
      }
    }
    return best;
  }

 private:
  int64_t* row(int w) { return &order_.actions[w * order_.length]; }

  // A random number from 0 to 1 (exclusive), of 53 bits.
  double uniform() {
    const double high = random_() >> 5, low = random_() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }

  // A random whole number below `below`.
  int64_t draw(int64_t below) {
    if (below == 1) return 0;
    uint32_t mask = 1;
    while (mask < below - 1) mask = 2 * mask + 1;
    int64_t found = below;
    while (found >= below) found = random_() & mask;
    return found;
  }

  // Whether the move would change the order of the micro-batches of one stage and kind.
  bool passes_another(int w, int64_t source, int64_t target) {
    const int64_t* actions = row(w);
    for (int64_t i = std::min(source, target); i <= std::max(source, target); ++i)
      if (i != source && actions[i] >> kKindShift == actions[source] >> kKindShift) return true;
    return false;
  }

  void shift(int w, int64_t source, int64_t target) {
    int64_t* actions = row(w);
    if (source < target) std::rotate(actions + source, actions + source + 1, actions + target + 1);
    if (target < source) std::rotate(actions + target, actions + source, actions + source + 1);
  }

  // The most bytes of stashes that a worker holds at once.
  double peak(int w) {
    double held = 0, most = 0;
    for (int64_t i = 0; i < order_.length && row(w)[i] != kNone; ++i) {
      const Kind kind = kind_of(row(w)[i]);
      if (kind == kForward) most = std::max(most, held += stash_[stage_of(row(w)[i])]);
      else if (kind != kInputs) held -= stash_[stage_of(row(w)[i])];
    }
    return most;
  }

  Order& order_;
  const Seconds& seconds_;
  const Rings& rings_;
  const double *stash_, *room_;
  std::mt19937 random_;
  Engine engine_;
};

}  // namespace dapple
