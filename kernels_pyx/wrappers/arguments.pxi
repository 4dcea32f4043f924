# Checks of arguments: every array is looked at through its buffer, so that no copy is made.

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_FillContiguousStrides,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.math cimport INFINITY, isfinite
from libc.string cimport memcpy

import sys
from operator import index

cdef dict BUFFER_FORMATS = {
    "float32": ("f",), "float64": ("d",), "float16": ("e",), "int8": ("b",), "uint8": ("B",),
    "int32": ("i",) if sizeof(int) == 4 else ("l",),
    "int64": ("l", "q") if sizeof(long) == 8 else ("q",),
}
# The formats with the byte order written out, as ctypes does; these codes have sizes of their own.
# The letter that NumPy writes, so that an array as it should be is taken after one comparison.
cdef dict FORMAT_LETTERS = {name: ord(formats[0]) for name, formats in BUFFER_FORMATS.items()}
cdef str NATIVE_ORDER = "<" if sys.byteorder == "little" else ">"
cdef dict STANDARD_FORMATS = {
    "float32": "f", "float64": "d", "float16": "e", "int8": "b", "uint8": "B", "int32": "il", "int64": "q",
}


cdef ptrdiff_t whole(object value, str name, ptrdiff_t least, ptrdiff_t most) except? -1:
    """Return a whole number within limits; TypeError for another type, ValueError outside them."""
    cdef object number
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be {least} to {most}, not {shortened(number)}")
    return number


cdef float finite(object value, str name) except? -1:
    """Return a number that is finite as a float32; TypeError for another type, else ValueError."""
    cdef double number
    try:
        number = value
    except TypeError:
        raise TypeError(f"{name} must be a number, not {type(value).__name__}") from None
    except OverflowError:
        number = INFINITY
    if not isfinite(<float>number):
        raise ValueError(f"{name} must be finite as a float32")
    return <float>number


cdef str shortened(object number):
    """A whole number for a message; one of more digits than anybody reads only as such."""
    return str(number) if -10**18 < number < 10**18 else "a number of more than 18 digits"


cdef int apart(tuple outputs, tuple inputs) except -1:
    """ValueError if an output shares memory with an input or with another output: the kernels
    read an input again after they have begun to write. Views that interleave count as sharing."""
    cdef Array output, other
    cdef Py_ssize_t i, j, count = len(outputs)
    for i in range(count):
        output = <Array>outputs[i]
        for other in inputs:
            require_apart(output, other)
        for j in range(i + 1, count):
            require_apart(output, <Array>outputs[j])
    return 0


cdef int require_apart(Array output, Array other) except -1:
    if output.first_byte() < other.end() and other.first_byte() < output.end():
        raise ValueError(f"{output.name} must not share memory with {other.name}")
    return 0


cdef str wanted(str dtype, int ndim, bint writable):
    return f"a {'writable ' if writable else ''}{dtype} array of {ndim} axes"


cdef class Array:
    """A checked view of an argument: C-contiguous, native, of one dtype and number of axes.

    With `heads`, the first axis may be strided by any multiple of whole rows, as in a view
    `cache[:, :n]` of a longer cache; each head must still be contiguous. TypeError for something
    that is no array or has another dtype or byte order, ValueError for another shape or memory
    layout; both name the argument. Holds the buffer while it lives.
    """
    cdef Py_buffer view
    cdef Py_ssize_t own_strides[4]
    cdef bint held
    cdef str name

    def __cinit__(self, object array, str name, str dtype, int ndim, bint writable=False,
                  bint heads=False):
        self.name = name
        if not PyObject_CheckBuffer(array):
            raise TypeError(f"{name} must be {wanted(dtype, ndim, writable)}, "
                            f"not {type(array).__name__}")
        try:
            PyObject_GetBuffer(array, &self.view, PyBUF_STRIDES | PyBUF_FORMAT
                               | (PyBUF_WRITABLE if writable else 0))
        except (BufferError, ValueError, TypeError, NotImplementedError) as error:
            raise ValueError(f"{name} must be {wanted(dtype, ndim, writable)}: {error}") from None
        self.held = True
        if (self.view.format == NULL or self.view.format[0] != <int>FORMAT_LETTERS[dtype]
                or self.view.format[1] != 0):
            self.require_format(dtype, ndim, writable)
        if self.view.ndim != ndim:
            raise ValueError(f"{name} must be {wanted(dtype, ndim, writable)}, "
                             f"it has {self.view.ndim}")
        if self.view.strides == NULL:  # ctypes: always contiguous
            PyBuffer_FillContiguousStrides(ndim, self.view.shape, self.own_strides,
                                           <int>self.view.itemsize, c"C")
            self.view.strides = self.own_strides
        if not self.contiguous_from(1 if heads else 0):
            raise ValueError(f"{name} must be C-contiguous; pass numpy.ascontiguousarray({name})")
        if <uintptr_t>self.view.buf % self.view.itemsize:
            raise ValueError(f"{name} is misaligned in memory; pass a copy")

    cdef int require_format(self, str dtype, int ndim, bint writable) except -1:
        """TypeError, or ValueError for a misaligned one, unless the items are of this dtype."""
        # An exporter may leave the format out: bytes.
        cdef str found = ((<bytes>self.view.format).decode("utf-8", "replace")
                          if self.view.format else "B")
        if found[:1] == "=" and found[1:] in BUFFER_FORMATS[dtype]:  # NumPy's mark of it
            raise ValueError(f"{self.name} is misaligned in memory; pass a copy")
        if found not in BUFFER_FORMATS[dtype] and not (
                len(found) == 2 and found[0] == NATIVE_ORDER
                and found[1] in STANDARD_FORMATS[dtype]):
            raise TypeError(f"{self.name} must be {wanted(dtype, ndim, writable)} in native byte "
                            f"order, its buffer format is {found!r}")
        return 0

    cdef bint contiguous_from(self, int first):
        """Whether the axes from `first` on are contiguous; an axis before must hold whole rows."""
        cdef Py_ssize_t expected = self.view.itemsize
        cdef int axis
        for axis in range(self.view.ndim):
            if self.view.shape[axis] == 0:
                return True  # no element, so no layout
        for axis in range(self.view.ndim - 1, first - 1, -1):
            if self.view.shape[axis] > 1 and self.view.strides[axis] != expected:
                return False
            expected *= self.view.shape[axis]
        if first == 1 and self.view.shape[0] > 1:
            return (self.view.strides[0] >= expected
                    and self.view.strides[0] % self.view.itemsize == 0)
        return True

    cdef ptrdiff_t size(self, int axis):
        return self.view.shape[axis]

    cdef ptrdiff_t head_stride(self):
        """Elements from one head to the next."""
        if self.view.shape[0] > 1 and self.view.len > 0:
            return self.view.strides[0] // self.view.itemsize
        return 0

    cdef uintptr_t first_byte(self):
        return <uintptr_t>self.view.buf

    cdef uintptr_t end(self):
        """The address behind the last element (strides are not negative here)."""
        cdef uintptr_t last = self.first_byte()
        cdef int axis
        if self.view.len == 0:
            return last
        for axis in range(self.view.ndim):
            last += <uintptr_t>((self.view.shape[axis] - 1) * self.view.strides[axis])
        return last + <uintptr_t>self.view.itemsize

    cdef bint has_shape(self, tuple shape):
        cdef int axis
        if len(shape) != self.view.ndim:
            return False
        for axis in range(self.view.ndim):
            if self.view.shape[axis] != <Py_ssize_t>shape[axis]:
                return False
        return True

    cdef int require_shape(self, tuple shape, str why) except -1:
        """ValueError unless the array has this shape; `why` says where the shape comes from."""
        if not self.has_shape(shape):
            found = tuple([self.view.shape[axis] for axis in range(self.view.ndim)])
            raise ValueError(f"{self.name} must have shape {shape} {why}, not {found}")
        return 0

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef class Private:
    """Memory of an array's size that no other thread can write to while the GIL is released.

    What C uses as an index is checked here and read from here; it begins as a copy of the array.
    What C reads back after writing it is made here, and then given to the array.
    """
    cdef void *data
    cdef Array array

    def __cinit__(self, Array array not None, bint output=False):
        self.array = array
        self.data = PyMem_Malloc(<size_t>array.view.len)
        if self.data == NULL:
            raise MemoryError(f"no memory for a copy of {array.name}")
        if not output:
            memcpy(self.data, array.view.buf, <size_t>array.view.len)

    cdef void give(self):
        memcpy(self.array.view.buf, self.data, <size_t>self.array.view.len)

    def __dealloc__(self):
        PyMem_Free(self.data)
