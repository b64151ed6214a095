// A driver without a GPU, for tests. Its log says in what order it was asked. Streams do nothing before somebody waits,
// and then go on in an order that is drawn at random: only what events demand can be relied on.
//
// Where the documentation leaves open whether a call needs a current context, or may harm a graph that some thread
// captures in the default mode, it does here.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "fake_streams.h"

namespace {

struct Point {  // of a stream, at which an event was recorded
  bool passed = false;
  long time = 0;
};
struct Range {
  uint64_t begin, bytes;
};
struct Step {
  std::shared_ptr<Point> after;  // or null
  std::function<void()> run;
  std::vector<Range> touched;  // empty for an event: what a test has in its place of kernels, which may touch anything
};

constexpr int kNoContext = 201, kCapturing = 900;
enum Mode { kGlobal, kThreadLocal, kRelaxed };

thread_local std::vector<void *> contexts = {nullptr};  // the current one last
thread_local int mode = kGlobal;                        // of captures
long made = 0, clock_ = 0, refuse_in = 0, spoilt = 0, queries = 0;
int broken = 0;
bool kernels = true, batches = true;
std::atomic<bool> stalled{false};
std::atomic<long> waiting{0};
std::map<long, std::thread::id> captured;         // streams, in the default mode, by whom
std::set<long> in_graphs;                         // events
std::map<long, std::shared_ptr<Point>> recorded;  // by event: where it was last recorded
std::map<long, std::deque<Step>> streams;
std::minstd_rand chance;

long number(void *handle) { return reinterpret_cast<long>(handle); }
int spoil(bool conflicts) { return conflicts ? ++spoilt, kCapturing : 0; }
bool refused() { return refuse_in && --refuse_in == 0; }
void ask(void *stream, std::shared_ptr<Point> after, std::function<void()> run, std::vector<Range> touched = {}) {
  streams[number(stream)].push_back({std::move(after), std::move(run), std::move(touched)});
}
void ask_copy(uint64_t target, uint64_t source, size_t nbytes, void *stream) {
  ask(stream, nullptr, [=] { std::memcpy(reinterpret_cast<void *>(target), reinterpret_cast<void *>(source), nbytes); },
      {{target, nbytes}, {source, nbytes}});
}
bool pending_anywhere() {
  for (auto &[stream, steps] : streams)
    if (!steps.empty()) return true;
  return false;
}

// What a call answers that needs a context, and that a capture may forbid.
int asked_wrongly() { return contexts.back() ? fake_unsafe() : kNoContext; }

void stall() {
  for (++waiting; stalled;) std::this_thread::yield();
  --waiting;
}

// Let one stream do some of what it can.
void go_on() {
  if (streams.empty()) return;
  auto stream = std::next(streams.begin(), chance() % streams.size());
  for (unsigned steps = chance() % 8; steps && !stream->second.empty(); --steps) {
    Step &step = stream->second.front();
    if (step.after && !step.after->passed) return;
    if (step.run) step.run();
    stream->second.pop_front();
  }
}

void go_on_until(const std::function<bool()> &reached) {
  for (long turns = 0; !reached(); ++turns) {
    if (turns == 1000000) std::printf("the streams wait for each other\n"), std::abort();
    go_on();
  }
}

}  // namespace

extern "C" {
void fake_seed(unsigned seed) { chance.seed(seed); }
void fake_go_on() { go_on(); }
void fake_refuse(long call) { refuse_in = call; }  // of those to come that give streams work or make events, from 1 on
long fake_events() { return made; }
long fake_queries() { return queries; }
long fake_pending(long stream) { return static_cast<long>(streams[stream].size()); }
void fake_kernels(bool on) { kernels = on; }  // whether events stand for them
void fake_batches(bool on) { batches = on; }  // whether it takes several copies in one call
bool fake_pending_at(uint64_t address, size_t bytes) {
  for (auto &[stream, steps] : streams)
    for (const Step &step : steps) {
      if (step.touched.empty() && kernels) return true;
      for (auto &[begin, size] : step.touched)
        if (begin < address + bytes && address < begin + size) return true;
    }
  return false;
}
void fake_break(int error) { broken = error; }  // what queries of events answer from now on, as after a failed kernel
void fake_capture(long stream, bool on) {
  if (on)
    captured[stream] = std::this_thread::get_id();
  else
    captured.erase(stream);
}
void fake_stall(bool on) { stalled = on; }  // while it is, whoever waits for streams does so without end
long fake_waiting() { return waiting; }     // how many do
long fake_spoilt() { return spoilt; }       // how often a capture was
int fake_unsafe() {
  bool mine = false;
  for (auto &[stream, thread] : captured) mine |= thread == std::this_thread::get_id();
  return spoil(mode == kGlobal ? !captured.empty() : mode == kThreadLocal && mine);
}
long fake_contexts() { return static_cast<long>(contexts.size()) - 1; }  // that this thread pushed and did not pop
int cuThreadExchangeStreamCaptureMode(int *given) { return std::swap(*given, mode), 0; }

int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = reinterpret_cast<void *>(1000L + device);
  return 0;
}
int cuCtxGetCurrent(void **context) { return *context = contexts.back(), 0; }
int cuCtxSetCurrent(void *context) {
  std::printf("context %ld\n", number(context));
  contexts.back() = context;
  return 0;
}
int cuCtxPushCurrent_v2(void *context) { return contexts.push_back(context), 0; }
int cuCtxPopCurrent_v2(void **context) {
  if (contexts.size() == 1) std::printf("a context is popped that nobody pushed\n"), std::fflush(stdout), std::abort();
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
int cuEventCreate(void **event, unsigned flags) {
  if (int error = asked_wrongly()) return error;
  if (refused()) return 700;
  std::printf("create %ld%s\n", ++made, flags == 2 ? " untimed" : "");
  *event = reinterpret_cast<void *>(made);
  return 0;
}
int cuEventRecord(void *event, void *stream) {
  if (!contexts.back()) return kNoContext;
  if (refused()) return 700;
  if (captured.count(number(stream))) return in_graphs.insert(number(event)), 0;
  in_graphs.erase(number(event));
  std::printf("record %ld on %ld\n", number(event), number(stream));
  auto point = recorded[number(event)] = std::make_shared<Point>();
  ask(stream, nullptr, [point] { *point = {true, ++clock_}; });
  return 0;
}
int cuEventQuery(void *event) {
  ++queries;
  if (int error = asked_wrongly()) return error;
  if (int error = spoil(in_graphs.count(number(event)))) return error;
  auto found = recorded.find(number(event));
  if (found == recorded.end()) std::printf("no such event\n"), std::fflush(stdout), std::abort();
  return broken ? broken : found->second->passed ? 0 : 600;
}
int cuEventDestroy_v2(void *event) {
  if (int error = asked_wrongly()) return error;
  recorded.erase(number(event));
  return 0;
}
int cuEventSynchronize(void *event) {
  if (int error = asked_wrongly()) return error;
  if (int error = spoil(in_graphs.count(number(event)))) return error;
  go_on_until([point = recorded[number(event)]] { return point->passed; });
  return 0;
}
int cuEventElapsedTime(float *ms, void *start, void *end) {
  if (int error = asked_wrongly()) return error;
  *ms = static_cast<float>(recorded[number(end)]->time - recorded[number(start)]->time);
  return 0;
}
int cuStreamCreate(void **stream, unsigned flags) {
  if (int error = asked_wrongly()) return error;
  if (flags != 1) std::printf("a stream that waits for the default one\n"), std::fflush(stdout), std::abort();
  static long streams_made = 100;
  *stream = reinterpret_cast<void *>(++streams_made);
  return 0;
}
int cuStreamDestroy_v2(void *) { return asked_wrongly(); }  // what it was given is carried out
int cuStreamWaitEvent(void *stream, void *event, unsigned) {
  if (!contexts.back()) return kNoContext;
  if (refused()) return 700;
  std::printf("%ld waits for %ld\n", number(stream), number(event));
  ask(stream, recorded[number(event)], nullptr);  // as of now; nothing to wait for if it was never recorded
  return 0;
}
int cuStreamSynchronize(void *stream) {
  if (int error = asked_wrongly()) return error;
  if (int error = spoil(captured.count(number(stream)))) return error;
  stall();
  go_on_until([stream] { return streams[number(stream)].empty(); });
  return 0;
}
int cuCtxSynchronize() {
  if (int error = asked_wrongly()) return error;
  if (int error = spoil(!captured.empty())) return error;  // in whatever mode
  stall();
  go_on_until([] { return !pending_anywhere(); });
  return 0;
}
int cuStreamIsCapturing(void *stream, int *status) {
  if (!contexts.back()) return kNoContext;
  *status = static_cast<int>(captured.count(number(stream)));
  return 0;
}
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void *stream) {
  if (!contexts.back()) return kNoContext;
  if (refused()) return 700;
  std::printf("copy %zu on %ld\n", nbytes, number(stream));
  ask_copy(target, source, nbytes, stream);
  return 0;
}
int cuMemcpyBatchAsync(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, int *attributes,
                       size_t *first, size_t kinds, size_t *, void *stream) {
  if (!contexts.back()) return kNoContext;
  if (!batches) return 801;
  if (refused()) return 700;
  if (kinds != 1 || *first != 0 || *attributes != 1) return 1;
  std::printf("copies");
  for (size_t k = 0; k < count; ++k) std::printf(" %zu", sizes[k]);
  std::printf(" on %ld\n", number(stream));
  // In whatever order.
  for (size_t k = count; k-- > 0;) ask_copy(targets[k], sources[k], sizes[k], stream);
  return 0;
}
}
