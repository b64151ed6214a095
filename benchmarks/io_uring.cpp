// Does io_uring with registered buffers move data to a drive and back faster than threads do?
//
// g++ -O2 -std=c++17 -pthread benchmarks/io_uring.cpp -o /tmp/io_uring && /tmp/io_uring FILE MIB
//
// Both keep as many requests of MIB in flight as the store does. FILE is opened with O_DIRECT, or without where that is
// refused, as some tmpfs do. FILE is made, 2 GiB large, and removed. Prints GB/s of four rounds; the two take turns.
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr unsigned kDepth = 12;  // torch_tiers.allocator.nvme.store.DEPTH
constexpr size_t kSize = size_t{2} << 30;

[[noreturn]] void fail(const char *what) {
  perror(what);
  exit(1);
}

struct Job {
  int file;
  size_t request;  // bytes
  std::vector<iovec> buffers;

  size_t count() const { return kSize / request; }
};

void by_threads(const Job &job, bool writes) {
  std::atomic<size_t> next{0};
  auto work = [&](void *buffer) {
    for (size_t i; (i = next++) < job.count();) {
      const off_t at = off_t(i * job.request);
      const ssize_t done =
          writes ? pwrite(job.file, buffer, job.request, at) : pread(job.file, buffer, job.request, at);
      if (done != ssize_t(job.request)) fail("transfer");
    }
  };
  std::vector<std::thread> threads;
  for (const iovec &buffer : job.buffers) threads.emplace_back(work, buffer.iov_base);
  for (std::thread &thread : threads) thread.join();
}

// io_uring by its raw system calls, without liburing.
class Ring {
 public:
  explicit Ring(const std::vector<iovec> &buffers) {
    ring_ = int(syscall(__NR_io_uring_setup, 2 * kDepth, &params_));
    if (ring_ < 0) fail("io_uring_setup");
    if (syscall(__NR_io_uring_register, ring_, IORING_REGISTER_BUFFERS, buffers.data(), buffers.size()) < 0)
      fail("registering buffers");
    submitted_ = map(params_.sq_off.array + params_.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    completed_ = map(params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe *>(map(params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
  }

  void add(const Job &job, size_t request, unsigned buffer, bool writes) {
    auto &tail = at<std::atomic<unsigned>>(submitted_, params_.sq_off.tail);
    const unsigned place = tail.load() & at<unsigned>(submitted_, params_.sq_off.ring_mask);
    io_uring_sqe &entry = entries_[place];
    memset(&entry, 0, sizeof entry);
    entry.opcode = writes ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    entry.fd = job.file;
    entry.addr = reinterpret_cast<uint64_t>(job.buffers[buffer].iov_base);
    entry.len = uint32_t(job.request);
    entry.off = request * job.request;
    entry.buf_index = uint16_t(buffer);
    entry.user_data = buffer;
    (&at<unsigned>(submitted_, params_.sq_off.array))[place] = place;
    ++tail;
  }

  void submit_and_wait(unsigned count) {
    if (syscall(__NR_io_uring_enter, ring_, count, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0) fail("io_uring_enter");
  }

  // Hands the buffer of each request that has ended to `take`.
  void ended(const Job &job, const std::function<void(unsigned)> &take) {
    auto &head = at<std::atomic<unsigned>>(completed_, params_.cq_off.head);
    auto &tail = at<std::atomic<unsigned>>(completed_, params_.cq_off.tail);
    auto *entries = &at<io_uring_cqe>(completed_, params_.cq_off.cqes);
    for (; head.load() != tail.load(); ++head) {
      const io_uring_cqe &entry = entries[head.load() & at<unsigned>(completed_, params_.cq_off.ring_mask)];
      if (entry.res != int(job.request)) fail("transfer by io_uring");
      take(unsigned(entry.user_data));
    }
  }

 private:
  char *map(size_t bytes, off_t what) const {
    void *found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, what);
    if (found == MAP_FAILED) fail("mmap");
    return static_cast<char *>(found);
  }
  template <typename T>
  static T &at(char *base, unsigned offset) {
    return *reinterpret_cast<T *>(base + offset);
  }

  io_uring_params params_{};
  int ring_ = -1;
  char *submitted_ = nullptr, *completed_ = nullptr;
  io_uring_sqe *entries_ = nullptr;
};

void by_ring(const Job &job, Ring &ring, bool writes) {
  std::vector<unsigned> free;
  for (unsigned i = 0; i < kDepth; ++i) free.push_back(i);
  for (size_t next = 0, done = 0; done < job.count();) {
    unsigned added = 0;
    for (; !free.empty() && next < job.count(); ++added, free.pop_back()) ring.add(job, next++, free.back(), writes);
    ring.submit_and_wait(added);
    ring.ended(job, [&](unsigned buffer) { free.push_back(buffer), ++done; });
  }
}

double rate(const std::function<void()> &move) {
  const auto begin = std::chrono::steady_clock::now();
  move();
  return double(kSize) / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 1e9;
}

}  // namespace

int main(int count, char **words) {
  if (count != 3) return fprintf(stderr, "usage: io_uring FILE MIB\n"), 2;
  Job job{-1, size_t(atol(words[2])) << 20, {}};
  job.file = open(words[1], O_RDWR | O_CREAT | O_EXCL | O_DIRECT, 0600);
  if (job.file < 0 && errno == EINVAL) job.file = open(words[1], O_RDWR | O_CREAT | O_EXCL, 0600);
  if (job.file < 0) fail(words[1]);
  unlink(words[1]);
  if (posix_fallocate(job.file, 0, kSize)) fail("posix_fallocate");
  for (unsigned i = 0; i < kDepth; ++i) {
    void *buffer = aligned_alloc(4096, job.request);
    memset(buffer, int(i + 1), job.request);
    job.buffers.push_back({buffer, job.request});
  }
  Ring ring(job.buffers);
  for (int round = 0; round < 4; ++round) {
    double found[2][2];  // written and read, by threads and by the ring
    for (bool reads : {false, true}) {
      for (bool second : {false, true}) {
        const bool rings = second != (round % 2 == 1);
        found[reads][rings] = rate([&] { rings ? by_ring(job, ring, !reads) : by_threads(job, !reads); });
      }
    }
    printf("write: threads %.2f, io_uring %.2f; read: threads %.2f, io_uring %.2f GB/s\n", found[0][0], found[0][1],
           found[1][0], found[1][1]);
  }
  return 0;
}
