# Each target is a stage of .ci/run, so that a laptop and CI run the same.
.PHONY: check lint types test

check:
	.ci/run

lint types test:
	.ci/run $@
