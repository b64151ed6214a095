// The key of the dispatcher at which operators come by.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

// The one place that names it. PyTorch reserves it for a mode of fake tensors in C++, which it has not got yet; a
// version that has one registers its own fallback, and then ours is refused.
constexpr auto kKey = c10::DispatchKey::Fake;

// It, and all that stands above it: with these excluded, what is called runs as what was recorded ran. Python's modes
// are above it, too, but for torch 2.11.
constexpr c10::DispatchKeySet kAbove =
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL) - c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey)) |
    c10::DispatchKeySet({c10::DispatchKey::PythonDispatcher, c10::DispatchKey::Python});

}  // namespace
