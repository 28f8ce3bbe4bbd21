// Device memory is host memory of the process; pinned memory is memory that is written down here.
//
// Faithful: how much there is (FAKE_CUDA_GB, 8 by default), what counts as pinned, registering twice and unregistering
// what was not registered are refused, cudaFree waits for the device.
// Stricter than CUDA: unpinning memory that a queued copy still uses is refused, where CUDA leaves it open.
// Not faithful: fresh device memory holds zeros, the host can read it, and the driver itself takes none of it.

#include "standin.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace {

using Address = std::size_t;

struct Block {
    std::size_t bytes;
    Kind kind;
};

struct Span {
    Address start;
    std::size_t bytes;
    bool meets(Address other, std::size_t other_bytes) const {
        return start < other + other_bytes && other < start + bytes;
    }
};

struct Copy {
    Span target, source;
};

struct Ledger {
    std::mutex lock;
    std::map<Address, Block> blocks;
    std::map<Flight, Copy> flights;
    Flight next_flight = 0;
    std::size_t device_bytes = 0;
};

// Never destroyed: threads of streams outlive the static objects when the process ends.
Ledger& ledger() {
    static Ledger& only = *new Ledger;
    return only;
}

constexpr std::size_t default_gib = 8;
constexpr std::size_t gib = std::size_t{1} << 30;

std::size_t capacity_bytes() {
    static const char* given = std::getenv("FAKE_CUDA_GB");
    static const std::size_t bytes = given ? std::size_t(std::atof(given) * gib) : default_gib * gib;
    return bytes;
}

Address at(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// The block that holds this address, or blocks.end(). The lock is held.
std::map<Address, Block>::iterator holder(Address address) {
    auto& blocks = ledger().blocks;
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return blocks.end();
    auto found = std::prev(after);
    return address < found->first + found->second.bytes ? found : blocks.end();
}

bool meets_a_block(Address start, std::size_t bytes) {
    auto next = ledger().blocks.lower_bound(start);
    return holder(start) != ledger().blocks.end() || (next != ledger().blocks.end() && next->first < start + bytes);
}

bool in_flight(Address start, std::size_t bytes) {
    for (const auto& [flight, copy] : ledger().flights)
        if (copy.target.meets(start, bytes) || copy.source.meets(start, bytes)) return true;
    return false;
}

void* fresh_pages(std::size_t bytes) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? nullptr : pages;
}

// Takes a block out of the ledger. The lock is held.
cudaError_t unpin(void* pointer, std::size_t* bytes) {
    auto found = ledger().blocks.find(at(pointer));
    if (found == ledger().blocks.end() || found->second.kind != Kind::pinned)
        return refuse(cudaErrorHostMemoryNotRegistered, "memory is unpinned that was not pinned");
    *bytes = found->second.bytes;
    if (in_flight(at(pointer), *bytes))
        return refuse(cudaErrorInvalidValue, "memory is unpinned under a copy in flight");
    ledger().blocks.erase(found);
    return cudaSuccess;
}

}  // namespace

Kind kind_of(const void* address) {
    std::lock_guard guard(ledger().lock);
    auto found = holder(at(address));
    return found == ledger().blocks.end() ? Kind::pageable : found->second.kind;
}

bool within_one(const void* address, std::size_t bytes) {
    std::lock_guard guard(ledger().lock);
    auto found = holder(at(address));
    if (found == ledger().blocks.end()) return !meets_a_block(at(address), bytes);
    return at(address) + bytes <= found->first + found->second.bytes;
}

Flight depart(const void* target, const void* source, std::size_t bytes) {
    std::lock_guard guard(ledger().lock);
    Flight flight = ledger().next_flight++;
    ledger().flights[flight] = {{at(target), bytes}, {at(source), bytes}};
    return flight;
}

void land(Flight flight) {
    std::lock_guard guard(ledger().lock);
    ledger().flights.erase(flight);
}

// ---- of the device ----

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard guard(ledger().lock);
    *total = capacity_bytes();
    *free = capacity_bytes() - ledger().device_bytes;
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    std::lock_guard guard(ledger().lock);
    // Torch answers this one itself: it empties its cache and tries again. So nothing is said on stderr.
    if (ledger().device_bytes + bytes > capacity_bytes()) return failed(cudaErrorMemoryAllocation);
    *pointer = fresh_pages(bytes);
    if (!*pointer) return failed(cudaErrorMemoryAllocation);
    ledger().blocks[at(*pointer)] = {bytes, Kind::device};
    ledger().device_bytes += bytes;
    return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
    if (!pointer) return cudaSuccess;
    wait_for_the_device();
    std::lock_guard guard(ledger().lock);
    auto found = ledger().blocks.find(at(pointer));
    if (found == ledger().blocks.end() || found->second.kind != Kind::device)
        return refuse(cudaErrorInvalidValue, "device memory is freed that was not allocated");
    ledger().device_bytes -= found->second.bytes;
    munmap(pointer, found->second.bytes);
    ledger().blocks.erase(found);
    return cudaSuccess;
}

// ---- pinned ----

API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    std::lock_guard guard(ledger().lock);
    *pointer = fresh_pages(bytes);
    if (!*pointer) return failed(cudaErrorMemoryAllocation);
    ledger().blocks[at(*pointer)] = {bytes, Kind::pinned};
    return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* pointer) {
    if (!pointer) return cudaSuccess;
    std::lock_guard guard(ledger().lock);
    std::size_t bytes = 0;
    cudaError_t result = unpin(pointer, &bytes);
    if (result == cudaSuccess) munmap(pointer, bytes);
    return result;
}

API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    std::lock_guard guard(ledger().lock);
    if (meets_a_block(at(pointer), bytes))
        return refuse(cudaErrorHostMemoryAlreadyRegistered, "memory is registered a second time");
    ledger().blocks[at(pointer)] = {bytes, Kind::pinned};
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
    std::lock_guard guard(ledger().lock);
    std::size_t bytes = 0;
    return unpin(pointer, &bytes);
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    Kind kind = kind_of(pointer);
    *attributes = {};
    attributes->type = kind == Kind::device   ? cudaMemoryTypeDevice
                       : kind == Kind::pinned ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
    attributes->hostPointer = const_cast<void*>(pointer);
    attributes->devicePointer = kind == Kind::pageable ? nullptr : const_cast<void*>(pointer);
    return cudaSuccess;
}
