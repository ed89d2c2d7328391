"""Java rules that Bazel's own packages load, which Bazel 4 has built in."""

java_import = native.java_import
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
