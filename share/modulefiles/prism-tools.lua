-- prism tools @VERSION@ for Lmod, written by make install. It may be copied or linked to where a site keeps its modulefiles.
whatis("Name: prism-tools")
whatis("Version: @VERSION@")
whatis("Description: emulates a training job of W ranks on a handful of machines")
help([[
prism-record, prism-slice, prism-calibrate, prism-replay and prism-inspect; start with "man prism-record".
$PRISM holds the examples, the make rules and the scripts for Slurm.
]])

local prefix = "@PREFIX@"
prepend_path("PATH", prefix .. "/bin")
prepend_path("MANPATH", prefix .. "/share/man")
append_path("MANPATH", "") -- the system's own pages stay
setenv("PRISM", prefix .. "/share/prism")
