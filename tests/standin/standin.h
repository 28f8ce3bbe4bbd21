// What the files of the stand-in share: the ledger of memory, and how a call is refused.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#if CUDART_VERSION < 13000 || CUDART_VERSION >= 14000
#error "the stand-in is written for the calls of CUDA 13: take a torch that was built for it (torch 2.11: +cu130)"
#endif

#define API extern "C" __attribute__((visibility("default")))

// What a call returns that did not succeed. As with CUDA the thread's next question for an error finds it, too.
cudaError_t failed(cudaError_t code);

// ... one that asked for what is wrong: `why` goes to stderr, as torch shows no more than the code.
cudaError_t refuse(cudaError_t code, const std::string& why);

// ---- memory.cpp ----

enum class Kind { pageable, pinned, device };

Kind kind_of(const void* address);

// Whether these bytes lie within one allocation or registration, or wholly outside of all that CUDA knows.
bool within_one(const void* address, std::size_t bytes);

// A copy that is queued and has not landed; its memory must stay where it is.
using Flight = std::size_t;
Flight depart(const void* target, const void* source, std::size_t bytes);
void land(Flight flight);

// ---- streams.cpp ----

void wait_for_the_device();
