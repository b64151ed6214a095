// Times every request and every free of a sequence through the core. Usage: request_latency PERIODS DISTURBANCE <
// SEQUENCE
//
// SEQUENCE is numbers: what lives as long as the program, each with its bytes; events, each a block's number and its
// bytes, or 0 for its free; the layout's requests, each with bytes and offset; the order of its pages. Each list begins
// with its length. DISTURBANCE is how many bytes other work touches between two calls: 0 leaves the caches to the core.
// Prints the nanoseconds of a call of the clock, and of every call in the periods after the first two.
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  uint64_t block, bytes;
};

uint64_t number() {
  uint64_t value = 0;
  if (std::scanf("%" SCNu64, &value) != 1) std::abort();
  return value;
}

void check(int status) {
  if (status == TN_OK) return;
  std::fprintf(stderr, "%s\n", tn_last_error());
  std::exit(1);
}

double between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::nano>(end - begin).count();
}

void print(const char *what, std::vector<double> &times, const char *end) {
  std::sort(times.begin(), times.end());
  auto at = [&](double share) { return times[size_t(share * double(times.size() - 1))]; };
  std::printf("\"%s\": {\"calls\": %zu, \"p50\": %.1f, \"p99\": %.1f, \"most\": %.1f}%s", what, times.size(), at(0.5),
              at(0.99), times.back(), end);
}

}  // namespace

int main(int, char **arguments) {
  int periods = std::atoi(arguments[1]);
  std::vector<char> elsewhere(std::strtoull(arguments[2], nullptr, 10));
  tn_core *core = nullptr;
  check(tn_open("memfd", 0, uint64_t{80} << 30, 0, &core));
  for (uint64_t left = number(), address = 0; left; --left) check(tn_allocate(core, number(), 0, 0, &address));
  std::vector<Event> events(number());
  uint64_t blocks = 0;
  for (Event &event : events) {
    event.block = number();
    event.bytes = number();
    blocks = std::max(blocks, event.block + 1);
  }
  std::vector<uint64_t> bytes(number()), offsets(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = number();
    offsets[i] = number();
  }
  std::vector<int64_t> costs(number());
  for (int64_t &of_unit : costs) of_unit = int64_t(number());

  std::vector<double> clock, allocations, frees;
  for (int i = 0; i < 100000; ++i) {
    auto begin = Clock::now();
    clock.push_back(between(begin, Clock::now()));
  }
  std::vector<uint64_t> addresses(blocks);
  tn_stats before{}, after{};
  for (int period = 0; period < periods + 2; ++period) {
    tn_mark(core, nullptr);
    uint64_t count = bytes.size();
    if (period == 1 && count)
      check(tn_set_layout(core, 0, 1, &count, bytes.data(), bytes.data(), offsets.data(), costs.size(), costs.data()));
    if (period == 2) tn_get_stats(core, &before);
    for (const Event &event : events) {
      for (size_t at = 0; at < elsewhere.size(); at += 64) ++elsewhere[at];
      auto begin = Clock::now();
      int status = event.bytes ? tn_allocate(core, event.bytes, 0, 0, &addresses[event.block])
                               : tn_free(core, addresses[event.block]);
      double took = between(begin, Clock::now());
      check(status);
      if (period >= 2) (event.bytes ? allocations : frees).push_back(took);
    }
  }
  tn_get_stats(core, &after);
  std::printf("{");
  print("clock", clock, ", ");
  print("allocate", allocations, ", ");
  print("free", frees, ", ");
  std::printf("\"planned\": %" PRId64 ", \"maps\": %" PRId64 "}\n", after.planned - before.planned,
              after.maps - before.maps);
  check(tn_close(core));
  return 0;
}
