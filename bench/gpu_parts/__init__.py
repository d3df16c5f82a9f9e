"""The parts of `bench.gpu`: each module has a function ``cases(setting)``, which yields the part's measurements."""
