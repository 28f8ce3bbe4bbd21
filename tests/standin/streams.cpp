// Each stream is a queue with a thread of its own: copies and events are as asynchronous as on a card.
//
// Faithful: order within a stream, events between streams, copies of pageable memory hold the caller up, a copy across
// two registrations is refused, an event's time is when the stream came to it, FAKE_CUDA_LATE_US holds up each copy.
// Not faithful: kernels take no time and no place in the queue, and the default stream waits for no other (torch makes
// all of its streams so that it need not).

#include "standin.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A point in a stream's queue that others can wait for. It is reached once.
class Moment {
  public:
    void reach() {
        std::lock_guard guard(lock_);
        at_ms_ = now_ms();
        reached_ = true;
        changed_.notify_all();
    }
    void wait() {
        std::unique_lock guard(lock_);
        changed_.wait(guard, [this] { return reached_; });
    }
    bool reached() {
        std::lock_guard guard(lock_);
        return reached_;
    }
    double at_ms() const { return at_ms_; }

  private:
    std::mutex lock_;
    std::condition_variable changed_;
    bool reached_ = false;
    double at_ms_ = 0;
};

using Work = std::function<void()>;

class Stream {
  public:
    // Its thread is its owner: it ends with the process, or after close().
    Stream() { std::thread([this] { run(); }).detach(); }

    void push(Work work) {
        std::lock_guard guard(lock_);
        queue_.push_back(std::move(work));
        arrived_.notify_one();
    }
    std::shared_ptr<Moment> mark() {
        auto moment = std::make_shared<Moment>();
        push([moment] { moment->reach(); });
        return moment;
    }
    void wait() { mark()->wait(); }
    bool idle() {
        std::lock_guard guard(lock_);
        return queue_.empty() && !working_;
    }
    void close() {
        push([this] { open_ = false; });
    }

  private:
    void run() {
        while (open_) next()();
        delete this;
    }
    Work next() {
        std::unique_lock guard(lock_);
        working_ = false;
        arrived_.wait(guard, [this] { return !queue_.empty(); });
        working_ = true;
        Work work = std::move(queue_.front());
        queue_.pop_front();
        return work;
    }

    std::mutex lock_;
    std::condition_variable arrived_;
    std::deque<Work> queue_;
    bool working_ = false;
    bool open_ = true;
};

struct Event {
    bool timed;
    std::shared_ptr<Moment> last;  // none: never recorded, which counts as reached
};

// Never destroyed: threads of streams outlive the static objects when the process ends.
struct Streams {
    std::mutex lock;
    std::set<Stream*> open;
};

Streams& streams() {
    static Streams& all = *new Streams;
    return all;
}

Stream* opened() {
    auto* stream = new Stream;
    std::lock_guard guard(streams().lock);
    streams().open.insert(stream);
    return stream;
}

Stream& default_stream() {
    static Stream* stream = opened();
    return *stream;
}

Stream& stream_of(cudaStream_t handle) {
    bool is_default = !handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
    return is_default ? default_stream() : *reinterpret_cast<Stream*>(handle);
}

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

void be_late() {
    static const char* given = std::getenv("FAKE_CUDA_LATE_US");
    static const int most_us = given ? std::atoi(given) : 0;
    thread_local std::minstd_rand random;
    if (most_us) std::this_thread::sleep_for(std::chrono::microseconds(random() % most_us));
}

bool pageable(const void* target, const void* source) {
    return kind_of(target) == Kind::pageable || kind_of(source) == Kind::pageable;
}

}  // namespace

void wait_for_the_device() {
    std::lock_guard guard(streams().lock);
    for (Stream* stream : streams().open) stream->wait();
}

API cudaError_t cudaDeviceSynchronize() {
    wait_for_the_device();
    return cudaSuccess;
}

// ---- streams ----

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int) {
    *handle = reinterpret_cast<cudaStream_t>(opened());
    return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    std::lock_guard guard(streams().lock);
    streams().open.erase(&stream_of(handle));
    stream_of(handle).close();
    return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    stream_of(handle).wait();
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return stream_of(handle).idle() ? cudaSuccess : failed(cudaErrorNotReady);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    if (auto moment = event_of(event).last) stream_of(handle).push([moment] { moment->wait(); });
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t call, void* data, unsigned) {
    stream_of(handle).push([=] { call(handle, cudaSuccess, data); });
    return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void* data) {
    stream_of(handle).push([=] { call(data); });
    return cudaSuccess;
}

// ---- nothing is ever captured into a graph ----

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- events ----

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
    *handle = reinterpret_cast<cudaEvent_t>(new Event{!(flags & cudaEventDisableTiming), nullptr});
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    delete &event_of(handle);
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    event_of(handle).last = stream_of(stream).mark();
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
    return cudaEventRecord(handle, stream);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    auto moment = event_of(handle).last;
    return !moment || moment->reached() ? cudaSuccess : failed(cudaErrorNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    if (auto moment = event_of(handle).last) moment->wait();
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    const Event &first = event_of(start), &second = event_of(end);
    if (!first.timed || !second.timed || !first.last || !second.last)
        return refuse(cudaErrorInvalidResourceHandle, "the time between events that were not recorded, or not timed");
    if (!first.last->reached() || !second.last->reached()) return failed(cudaErrorNotReady);
    *ms = float(second.last->at_ms() - first.last->at_ms());
    return cudaSuccess;
}

// ---- copies ----

API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    if (!within_one(target, bytes) || !within_one(source, bytes))
        return refuse(cudaErrorInvalidValue, "a copy of " + std::to_string(bytes) + " bytes leaves what was registered");
    Flight flight = depart(target, source, bytes);
    stream_of(stream).push([=] {
        be_late();
        std::memmove(target, source, bytes);
        land(flight);
    });
    if (pageable(target, source)) stream_of(stream).wait();
    return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t result = cudaMemcpyAsync(target, source, bytes, kind, nullptr);
    stream_of(nullptr).wait();
    return result;
}

API cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
    Flight flight = depart(target, target, bytes);
    stream_of(stream).push([=] {
        std::memset(target, value, bytes);
        land(flight);
    });
    return cudaSuccess;
}

API cudaError_t cudaMemset(void* target, int value, size_t bytes) {
    return cudaMemsetAsync(target, value, bytes, nullptr);
}
