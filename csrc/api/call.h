// A call of flash_kda.fwd read straight from Python's objects: the quick way for the calls that engines make thousands
// of times a second. What it does not take, flash_kda/validation.py looks at, which also words the errors.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "api/dlpack.h"
#include "params.h"

namespace flash_kda {

// What reads PyTorch's tensors. Borrowed references, to what lives as long as the process.
struct Torch {
  dlpack::Table const* table;
  PyObject* tensor;           // the type torch.Tensor
  PyObject* parameter;        // the type torch.nn.Parameter
  PyObject* is_grad_enabled;  // the function
};

// The table in a capsule, if it is of a version and has the functions that are used here; else null, without an error.
dlpack::Table const* find_table(PyObject* capsule);

struct Call {
  GeneralParams params;
  bool is_plain;  // the plain kernels serve it
  dlpack::Device device;
};

constexpr Py_ssize_t kPositionalArguments = 13, kArguments = 22;

// True, if the call is legal by the rules of flash_kda/validation.py and usual; `call` then holds it. False may also
// meet a legal call, but true never an illegal one. `arguments` are those of flash_kda.fwd in order: all kArguments, or
// kPositionalArguments for a call whose other arguments are at their defaults. Leaves no Python error. Needs the GIL.
//
// Usual means that all of the tensors have elements, that the address ranges of the outputs meet no other tensor's (but
// for a state that is updated in place), and that the caller lays out the checkpoints.
bool read_call(Call& call, Torch const& torch, PyObject* const* arguments, Py_ssize_t count);

}  // namespace flash_kda
