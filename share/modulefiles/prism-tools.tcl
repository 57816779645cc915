#%Module1.0
# prism tools @VERSION@, written by make install. It may be copied or linked to where a site keeps its modulefiles.
module-whatis "prism-tools @VERSION@: emulates a training job of W ranks on a handful of machines"
proc ModulesHelp {} {
    puts stderr {prism-record, prism-slice, prism-calibrate, prism-replay and prism-inspect; start with "man prism-record".}
    puts stderr {$PRISM holds the examples, the make rules and the scripts for Slurm.}
}

conflict prism-tools
set prefix {@PREFIX@}
prepend-path PATH $prefix/bin
prepend-path MANPATH $prefix/share/man
append-path MANPATH {} ;# the system's own pages stay
setenv PRISM $prefix/share/prism
