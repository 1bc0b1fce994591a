//! What sysfs knows of a device, and libibverbs does not tell: where it is, and how fast.

use std::fs;
use std::path::{Path, PathBuf};

/// A device's folder.
pub struct Sysfs {
    folder: PathBuf,
}

impl Sysfs {
    /// Of the device `name` in the sysfs that is mounted at `root` ("/sys").
    pub fn new(root: &Path, name: &str) -> Self {
        Self { folder: root.join("class/infiniband").join(name) }
    }

    /// NUMA node; `None` where the kernel does not know, or there is only one as far as it knows (-1).
    pub fn numa_node(&self) -> Option<u32> {
        self.read("device/numa_node")?.parse().ok()
    }

    /// See [`Device::pci_path`](crate::table::Device::pci_path).
    pub fn pci_path(&self) -> Option<String> {
        let place = fs::canonicalize(self.folder.join("device")).ok()?;
        let parts = place.iter().map(|part| part.to_string_lossy());
        // On some machines the host bridges are deeper in the tree.
        let below: Vec<_> = parts.skip_while(|part| !part.starts_with("pci")).collect();
        (!below.is_empty()).then(|| below.join("/"))
    }

    /// Speed of a port in Mbit/s, 0 where it is not told: `100 Gb/sec (4X EDR)`.
    pub fn mbit_per_s(&self, port: u8) -> u32 {
        let rate = self.read(&format!("ports/{port}/rate")).unwrap_or_default();
        match rate.split_once(" Gb/sec").map(|(gbit, _)| gbit.parse::<f64>()) {
            // Saturates.
            Some(Ok(gbit)) => (gbit * 1000.0) as u32,
            _ => 0,
        }
    }

    fn read(&self, name: &str) -> Option<String> {
        Some(fs::read_to_string(self.folder.join(name)).ok()?.trim().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A sysfs of our own, gone when dropped.
    struct Fake(PathBuf);

    impl Fake {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("mdas-sysfs-{}-{name}", std::process::id()));
            fs::create_dir_all(root.join("class/infiniband")).unwrap();
            Self(root)
        }

        fn write(&self, path: &str, text: &str) {
            let file = self.0.join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn an_adapter_on_the_bus() {
        let fake = Fake::new("adapter");
        for above in ["", "platform/bus@0/"] {
            let place = format!("devices/{above}pci0000:3a/0000:3a:00.0/0000:3b:00.0");
            let name = format!("mlx5_{}", above.len());
            fake.write(&format!("{place}/numa_node"), "1\n");
            fake.write(&format!("{place}/infiniband/{name}/ports/2/rate"), "200 Gb/sec (4X HDR)\n");
            let folder = fake.0.join(&place).join("infiniband").join(&name);
            symlink("../..", folder.join("device")).unwrap();
            symlink(&folder, fake.0.join("class/infiniband").join(&name)).unwrap();
            let sysfs = Sysfs::new(&fake.0, &name);
            assert_eq!(sysfs.numa_node(), Some(1));
            assert_eq!(sysfs.pci_path().unwrap(), "pci0000:3a/0000:3a:00.0/0000:3b:00.0");
            assert_eq!([sysfs.mbit_per_s(1), sysfs.mbit_per_s(2)], [0, 200_000]);
        }
    }

    #[test]
    fn a_device_that_is_on_no_bus() {
        let fake = Fake::new("virtual");
        fake.write("class/infiniband/rxe0/ports/1/rate", "2.5 Gb/sec (1X SDR)\n");
        fake.write("class/infiniband/rxe1/device/numa_node", "-1\n");
        fake.write("class/infiniband/rxe1/ports/1/rate", "fast\n");
        let (first, second) = (Sysfs::new(&fake.0, "rxe0"), Sysfs::new(&fake.0, "rxe1"));
        assert_eq!((first.numa_node(), first.pci_path(), first.mbit_per_s(1)), (None, None, 2500));
        assert_eq!((second.numa_node(), second.pci_path(), second.mbit_per_s(1)), (None, None, 0));
        assert_eq!(Sysfs::new(&fake.0, "gone").numa_node(), None);
    }
}
