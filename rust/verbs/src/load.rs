//! Finds libibverbs when it is first needed.

use crate::sys;
use libc::{c_char, c_int, c_uint, c_void};
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

/// Names another file than the system's.
pub const VARIABLE: &str = "MDAS_IBVERBS_LIB";

/// The library's name on every distribution.
const NAME: &str = "libibverbs.so.1";

macro_rules! functions {
    ($($name:ident @ $version:literal: fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions that are used, at the versions whose signatures are declared here.
        #[derive(Clone, Copy)]
        pub struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $result,)*
            /// From rdma-core 34 on.
            pub(crate) ibv_reg_dmabuf_mr:
                Option<unsafe extern "C" fn(*mut sys::Pd, u64, usize, u64, c_int, c_int) -> *mut sys::Mr>,
            /// Does the kernel copy registered pages for a forked child, which otherwise has to do without them?
            pub(crate) copies_for_children: bool,
        }

        impl Library {
            fn from(handle: *mut c_void) -> Result<Library, String> {
                Ok(Library {
                    $($name: {
                        let found = symbol(handle, stringify!($name), $version)?;
                        // SAFETY: the symbol of this name and version has this signature: the library's ABI, which
                        // versioned symbols keep for good.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $result>(found) }
                    },)*
                    ibv_reg_dmabuf_mr: symbol(handle, "ibv_reg_dmabuf_mr", "IBVERBS_1.12").ok().map(|found| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn(*mut sys::Pd, u64, usize, u64, c_int, c_int) -> *mut sys::Mr,
                            >(found)
                        }
                    }),
                    copies_for_children: false,
                })
            }
        }
    };
}

functions! {
    ibv_fork_init @ "IBVERBS_1.1": fn() -> c_int;
    ibv_get_device_list @ "IBVERBS_1.1": fn(*mut c_int) -> *mut *mut sys::Device;
    ibv_free_device_list @ "IBVERBS_1.1": fn(*mut *mut sys::Device) -> ();
    ibv_open_device @ "IBVERBS_1.1": fn(*mut sys::Device) -> *mut sys::Context;
    ibv_close_device @ "IBVERBS_1.1": fn(*mut sys::Context) -> c_int;
    ibv_query_device @ "IBVERBS_1.1": fn(*mut sys::Context, *mut sys::DeviceAttr) -> c_int;
    ibv_query_port @ "IBVERBS_1.1": fn(*mut sys::Context, u8, *mut sys::PortAttr) -> c_int;
    _ibv_query_gid_ex @ "IBVERBS_1.11": fn(*mut sys::Context, u32, u32, *mut sys::GidEntry, u32, usize) -> c_int;
    ibv_get_async_event @ "IBVERBS_1.1": fn(*mut sys::Context, *mut sys::AsyncEvent) -> c_int;
    ibv_ack_async_event @ "IBVERBS_1.1": fn(*mut sys::AsyncEvent) -> ();
    ibv_alloc_pd @ "IBVERBS_1.1": fn(*mut sys::Context) -> *mut sys::Pd;
    ibv_dealloc_pd @ "IBVERBS_1.1": fn(*mut sys::Pd) -> c_int;
    ibv_reg_mr_iova2 @ "IBVERBS_1.8": fn(*mut sys::Pd, *mut c_void, usize, u64, c_uint) -> *mut sys::Mr;
    ibv_dereg_mr @ "IBVERBS_1.1": fn(*mut sys::Mr) -> c_int;
    ibv_create_comp_channel @ "IBVERBS_1.0": fn(*mut sys::Context) -> *mut sys::CompChannel;
    ibv_destroy_comp_channel @ "IBVERBS_1.0": fn(*mut sys::CompChannel) -> c_int;
    ibv_create_cq @ "IBVERBS_1.1":
        fn(*mut sys::Context, c_int, *mut c_void, *mut sys::CompChannel, c_int) -> *mut sys::Cq;
    ibv_destroy_cq @ "IBVERBS_1.1": fn(*mut sys::Cq) -> c_int;
    ibv_get_cq_event @ "IBVERBS_1.1": fn(*mut sys::CompChannel, *mut *mut sys::Cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events @ "IBVERBS_1.1": fn(*mut sys::Cq, c_uint) -> ();
    ibv_create_qp @ "IBVERBS_1.1": fn(*mut sys::Pd, *mut sys::QpInitAttr) -> *mut sys::Qp;
    ibv_modify_qp @ "IBVERBS_1.1": fn(*mut sys::Qp, *mut sys::QpAttr, c_int) -> c_int;
    ibv_destroy_qp @ "IBVERBS_1.1": fn(*mut sys::Qp) -> c_int;
    ibv_wc_status_str @ "IBVERBS_1.1": fn(c_int) -> *const c_char;
}

/// The library, loaded once per process; the error says which file was tried and why it does not do.
///
/// Also prepares the process for forks where that is needed (`ibv_fork_init`): a forked child's writes would otherwise
/// leave the parent with other pages than the device has.
pub fn library() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> Result<Library, String> {
    let wanted = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
    let name = wanted.as_ref().map_or(NAME.into(), |name| name.to_string_lossy().into_owned());
    let path = CString::new(name.clone()).map_err(|_| format!("{VARIABLE} contains a zero byte"))?;
    // SAFETY: a NUL-terminated name. The constructors of the file that the user, or the system, names run.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        let hint =
            if wanted.is_some() { VARIABLE } else { "install rdma-core (Debian: libibverbs1 and ibverbs-providers)" };
        return Err(format!("cannot load {name}: {} ({hint})", reason()));
    }
    let mut library =
        Library::from(handle).map_err(|missing| format!("{name} is too old, or not libibverbs: {missing}"))?;
    // Where the kernel copies registered pages for a forked child, `ibv_fork_init` would only harm: it takes whole pages
    // away from the child, and with them whatever else lies on them.
    library.copies_for_children = symbol(handle, "ibv_is_fork_initialized", "IBVERBS_1.13").is_ok_and(|found| {
        // SAFETY: the type that infiniband/verbs.h gives it.
        let status = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(found) };
        // SAFETY: it has no conditions.
        let status = unsafe { status() };
        status == sys::FORK_UNNEEDED
    });
    // SAFETY: no device is open yet, and this is called once.
    let rc = if library.copies_for_children { 0 } else { unsafe { (library.ibv_fork_init)() } };
    if rc != 0 {
        // Old kernels only; everything works but forking.
        log::warn!("ibv_fork_init: {}", std::io::Error::from_raw_os_error(rc.abs()));
    }
    Ok(library)
}

fn symbol(handle: *mut c_void, name: &str, version: &str) -> Result<*mut c_void, String> {
    let missing = || format!("it has no {name}@{version}");
    let (c_name, c_version) = (CString::new(name), CString::new(version));
    let (Ok(c_name), Ok(c_version)) = (c_name, c_version) else { return Err(missing()) };
    // SAFETY: the handle is open and never closed; both strings end in NUL.
    let found = unsafe { libc::dlvsym(handle, c_name.as_ptr(), c_version.as_ptr()) };
    if found.is_null() { Err(missing()) } else { Ok(found) }
}

fn reason() -> String {
    // SAFETY: dlerror returns NULL or a string of this thread's that lives until its next call.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    text.unwrap_or_else(|| "no reason given".into())
}
