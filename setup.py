"""Builds the extension package kernels_pyx; everything else is in pyproject.toml.

A missing compiler, Python header or Cython is no error: one line says so and the course runs on
its NumPy backend. COURSE_REQUIRE_KERNELS=1 makes it an error, also where only one of the variants
does not compile. The last line printed always starts with "kernels: " and ends with what is there
or missing; course_lib/launcher/environment.py reads it.

For tests: COURSE_KERNEL_FLAGS are more compiler and linker flags, after all others;
COURSE_KERNEL_CHECKS=1 switches on Cython's run-time checks; COURSE_OPENMP=0 leaves threads out.
"""

import glob
import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

C = "kernels_pyx/c"


class NotBuilt(Exception):
    """Why the kernels were not compiled. `missing`: the program or header that was looked for."""

    def __init__(self, text, missing="?"):
        super().__init__(text)
        self.missing = missing


class BuildKernels(build_ext):
    """build_ext that survives a machine without compiler, headers or Cython."""

    def run(self):
        in_place = self.inplace  # which setuptools sets aside while it builds
        compiler = os.environ.get("CC")
        if compiler is not None and not compiler.strip():
            del os.environ["CC"]  # empty is as good as not set
        elif compiler and shutil.which(compiler):
            os.environ["CC"] = shlex.quote(compiler)  # one program, although there are spaces
        try:
            super().run()
            if not all(os.path.exists(self.get_ext_fullpath(ext.name)) for ext in self.extensions):
                raise NotBuilt("the compiler made no file")
        except NotBuilt as reason:
            self.inplace = in_place
            self.give_up(reason)
        except Exception as error:  # a CC that is no compiler, flags with a lone quote, a full disk
            self.inplace = in_place
            said = " ".join(str(error).split())
            self.give_up(NotBuilt(f"the compiler or its flags cannot be used ({said})"))
        else:
            files = os.pathsep.join(self.get_ext_fullpath(ext.name) for ext in self.extensions)
            names = ", ".join(name for name in self.variants if name != "portable_fma")
            left_out = f", without {', '.join(self.left_out)}" if self.left_out else ""
            print(f"kernels: {names} compiled for {self.target}{left_out}{self.threads} "
                  f"[files: {files}]")

    def give_up(self, reason):
        """Leave the course to NumPy, unless kernels are required."""
        self.remove_old()
        if os.environ.get("COURSE_REQUIRE_KERNELS") == "1":
            raise SystemExit(f"error: kernels: not built: {reason}")
        print(f"kernels: not built, NumPy backend instead (slower): {reason} "
              f"[missing: {reason.missing}]")

    def remove_old(self):
        """Kernels of an earlier source must not run in place of those that did not compile."""
        for extension in self.extensions:
            path = self.get_ext_fullpath(extension.name)
            if os.path.exists(path):
                os.remove(path)

    def build_extensions(self):
        compiler = self.compiler.compiler_so[0]
        if shutil.which(compiler) is None:
            remedy = "sudo apt install gcc" if shutil.which("apt-get") else "install gcc or clang"
            raise NotBuilt(f"no C compiler ({compiler}); {remedy}", compiler)
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.exists(header):
            version = sysconfig.get_python_version()
            raise NotBuilt(f"no Python headers; sudo apt install python{version}-dev", header)
        self.target = target_of(self.compiler.compiler_so)
        more = shlex.split(os.environ.get("COURSE_KERNEL_FLAGS", ""))
        openmp = self.openmp_flags()
        self.threads = "" if openmp else ", one thread (no OpenMP)"
        for extension in self.extensions:
            extension.extra_compile_args = compile_flags(self.target) + openmp + more
            extension.extra_link_args = openmp + more
        try:
            super().build_extensions()
        except NotBuilt:
            raise
        except Exception as error:  # distutils, setuptools and Cython each have their own
            print(error)
            raise NotBuilt("the compiler failed, its messages are in the log") from error

    def openmp_flags(self):
        """Return the flag for threads if the compiler and its library can use it, else nothing."""
        if os.environ.get("COURSE_OPENMP") == "0":
            return []
        os.makedirs(self.build_temp, exist_ok=True)
        source = os.path.join(self.build_temp, "openmp.c")
        with open(source, "w", encoding="ascii") as file:
            file.write("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
        command = [*self.compiler.linker_exe, "-fopenmp", source, "-o", source[:-2]]
        works = subprocess.run(command, capture_output=True).returncode == 0
        return ["-fopenmp"] if works else []

    def build_extension(self, ext):
        try:
            from Cython.Build import cythonize
        except ImportError:
            raise NotBuilt("Cython is not installed; pip install cython") from None
        checks = {"language_level": 3}
        if os.environ.get("COURSE_KERNEL_CHECKS") == "1":
            names = ("boundscheck", "wraparound", "initializedcheck", "nonecheck", "overflowcheck")
            checks |= dict.fromkeys(names, True)
        (compiled,) = cythonize([ext], build_dir=self.build_temp, quiet=True,
                                compiler_directives=checks)
        compiled._needs_stub = False
        self.compile_variants(compiled)
        super().build_extension(compiled)

    def compile_variants(self, ext):
        """Compile each variant apart: one that a compiler is too old for does not cost the others.
        At import the CPU decides which of them run. The wrapper takes longest and comes first."""
        wanted = variants_for(self.target)
        wrapper = ext.sources.pop(0)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            wrapped = pool.submit(self.compile_file, ext, wrapper)
            objects = dict(zip(wanted, pool.map(lambda name: self.compile_variant(ext, name),
                                                wanted), strict=True))
        self.variants = [name for name in wanted if objects[name]]
        self.left_out = [name for name in wanted if not objects[name]]
        if not objects["portable"]:
            raise NotBuilt("the compiler failed, its messages are in the log")
        if self.left_out and os.environ.get("COURSE_REQUIRE_KERNELS") == "1":
            raise NotBuilt(f"the compiler failed on {', '.join(self.left_out)}")
        ext.extra_objects += wrapped.result()
        ext.extra_objects += [path for name in self.variants for path in objects[name]]
        # choose.c names every variant of the target but these.
        ext.define_macros += [(f"WITHOUT_{name.upper()}", None) for name in self.left_out]

    def compile_variant(self, ext, name):
        """Return the object files of one variant, or nothing if it does not compile."""
        try:
            return self.compile_file(ext, f"{C}/variants/{name}.c")
        except Exception as error:  # as above
            print(f"{name}: {error}")
            return []

    def compile_file(self, ext, source):
        """Return the object files of one source."""
        return self.compiler.compile([source], output_dir=self.build_temp,
                                     include_dirs=ext.include_dirs,
                                     extra_postargs=ext.extra_compile_args)


def target_of(compiler):
    """Return the target triplet of a compiler: what is built may not be for this machine. All its
    words are needed: the first may be a wrapper such as ccache."""
    answer = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True)
    return answer.stdout.strip() or "an unknown target"


def variants_for(target):
    """Return the variants to compile for `target`."""
    return {
        "x86_64": ["portable", "portable_fma", "avx2", "avx512"],
        "aarch64": ["portable", "neon", "dotprod"],
        "arm64": ["portable", "neon", "dotprod"],
    }.get(target.split("-", 1)[0], ["portable"])


def compile_flags(target):
    """Return the flags for `target`. No -march, no -ffast-math: the bits must be the same on every
    machine, so no contraction into fused multiply-adds that the source does not ask for. Python's
    own flags ask for debugging information, which takes a third of the time."""
    flags = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno",
             "-Werror=incompatible-pointer-types", "-Werror=int-conversion"]  # as from gcc 14 on
    if target.split("-", 1)[0] in ("i386", "i486", "i586", "i686"):
        flags += ["-msse2", "-mfpmath=sse"]  # x87 would keep extra bits
    return flags


setup(
    ext_modules=[
        Extension(
            "kernels_pyx.compiled",
            sources=["kernels_pyx/compiled.pyx", f"{C}/choose.c", f"{C}/parallel.c",
                     f"{C}/workspace.c"],
            depends=sorted(glob.glob("kernels_pyx/**/*.p[xy][ix]", recursive=True)
                           + glob.glob(f"{C}/**/*.[ch]", recursive=True)),
            include_dirs=[C],
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
