# Rules of GNU make that take a job from its program to a report:
#
#   NAME.bare.h5 -> NAME.sliced.h5 -> NAME.calibrated.h5 -> NAME.replayed.h5 -> NAME.report.txt
#                                                       \-> NAME.timeline.png
#
# A Makefile says what the job is, includes this file and asks for a report by its name (see examples/straggler):
#
#   PROGRAM  the program and its arguments, as prism-record takes them after "--", quoted as for a shell (changes of a module,
#            and of a file whose name has blanks, are not noticed)
#   WORLD    logical ranks
#   RANKS    those to replay, such as 0-3,8
#   JOBS     ranks recorded at a time (default: all cores)
#   SLICE    ranks measured at a time (default: 2)
#   DELAY    what is late in the replay, such as 421=12ms: a rank, that much in each iteration (several: word by word)
#
# They may differ from target to target (big.report.txt: WORLD = 64). A stage is made anew when the one before it, the
# program's file or what it was asked for has changed; the last is kept in NAME.STAGE.h5.asked, from the stage's end on.

SLICE ?= 2

# What ran beside a measurement would be measured too. Recording runs JOBS ranks at a time all the same.
.NOTPARALLEL:
# No graph is removed because it was only on the way to a report; one whose tool failed or was interrupted is.
.SECONDARY:
.DELETE_ON_ERROR:
.SECONDEXPANSION:
.PHONY: prism-anew

prism-needed = $(or $(strip $($(1))),$(error $@: $(1) is not set; say in the Makefile $(2)))
prism-record = -n $(WORLD) -- $(PROGRAM)
prism-slice  = -s $(SLICE)
prism-replay = -r $(RANKS) $(DELAY:%=--delay %)

# $(call prism-changed,TARGET,TEXT): prism-anew, a target that is never up to date, unless TARGET was made for TEXT.
prism-changed = $(if $(call prism-equal,x$(strip $(2))x,x$(file <$(1).asked)x),,prism-anew)
prism-equal = $(and $(findstring $(1),$(2)),$(findstring $(2),$(1)))
prism-asked = @printf '%s\n' '$(subst ','\'',$(strip $(1)))' > $@.asked

%.bare.h5: $$(wildcard $$(firstword $$(PROGRAM))) $$(call prism-changed,$$@,$$(prism-record))
	@rm -f $@.asked
	prism-record -n $(call prism-needed,WORLD,how many ranks)$(JOBS:%= -j %) -o $@ -- $(call prism-needed,PROGRAM,what runs)
	$(call prism-asked,$(prism-record))

%.sliced.h5: %.bare.h5 $$(call prism-changed,$$@,$$(prism-slice))
	@rm -f $@.asked
	prism-slice $< $(prism-slice) -o $@
	$(call prism-asked,$(prism-slice))

%.calibrated.h5: %.sliced.h5
	prism-calibrate $< -o $@

%.replayed.h5: %.calibrated.h5 $$(call prism-changed,$$@,$$(prism-replay))
	@rm -f $@.asked
	prism-replay -r $(call prism-needed,RANKS,which ranks to replay)$(DELAY:%= --delay %) $< -o $@
	$(call prism-asked,$(prism-replay))

# Written when its text is whole.
%.report.txt: %.replayed.h5
	@text=$$(prism-inspect summary $<) && printf '%s\n' "$$text" | tee $@

%.timeline.png: %.calibrated.h5
	prism-inspect timeline $< -o $@
