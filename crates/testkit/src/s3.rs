//! A private S3: SeaweedFS on an empty disk.

use crate::process::{Folder, PORT_TRIES, Port, Process, wait_until_it_answers};
use crate::tools;

/// An S3 server of one test's own. Buckets are made by the first upload.
#[derive(Debug)]
pub struct S3 {
    /// `http://127.0.0.1:PORT`
    pub endpoint: String,
    process: Option<Process>,
    /// Master, volume, filer and gateway, each with its internal port; the last is the gateway's.
    ports: Vec<Port>,
    folder: Folder,
}

/// The only key it knows.
pub const ACCESS_KEY: &str = "tidemark";
/// And its other half.
pub const SECRET_KEY: &str = "only-for-tests";

impl S3 {
    /// Starts one; `None`, said aloud, where SeaweedFS is not installed.
    pub async fn start() -> anyhow::Result<Option<Self>> {
        if let Err(error) = tools::find("weed", &["py/bin/weed", "bin/weed"]) {
            eprintln!("skipped: {error}");
            return Ok(None);
        }
        for attempt in 1.. {
            let folder = Folder::new("s3")?;
            let ports = (0..8).map(|_| Port::free()).collect::<Result<Vec<_>, _>>()?;
            let endpoint = format!("http://127.0.0.1:{}", ports[7].number);
            let mut server = Self { endpoint, process: None, ports, folder };
            match server.launch().await {
                Err(error) if attempt < PORT_TRIES => drop(error), // Somebody took a port first.
                launched => return launched.map(|()| Some(server)),
            }
        }
        unreachable!("the loop returns on its last attempt")
    }

    async fn launch(&mut self) -> anyhow::Result<()> {
        let program = tools::find("weed", &["py/bin/weed", "bin/weed"])?;
        let (disk, config) = (self.folder.0.join("disk"), self.folder.0.join("s3.json"));
        std::fs::create_dir_all(&disk)?;
        let identity = serde_json::json!({ "identities": [{
            "name": "test", "credentials": [{ "accessKey": ACCESS_KEY, "secretKey": SECRET_KEY }],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }] });
        std::fs::write(&config, identity.to_string())?;
        let names = [
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "s3.port.grpc",
            "s3.port",
        ];
        let mut args: Vec<String> = [
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer=true",
            "-s3=true",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-volume.max=20",
            "-volume.minFreeSpace=1MiB",
            "-master.volumeSizeLimitMB=64",
        ]
        .map(str::to_owned)
        .into();
        args.push(format!("-dir={}", disk.display()));
        args.push(format!("-s3.config={}", config.display()));
        args.extend(names.iter().zip(&self.ports).map(|(name, port)| format!("-{name}={}", port.number)));
        let log = self.folder.0.join("server.log");
        self.process = Some(Process::start(&program, &args, &log)?);
        let question = b"GET / HTTP/1.0\r\n\r\n";
        wait_until_it_answers("weed", self.ports[7].number, question, "HTTP/1.0 403", &log).await
    }

    /// What `s3://` URLs need of the environment to find it.
    pub fn variables(&self) -> [(String, String); 5] {
        [
            ("AWS_ENDPOINT", self.endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
    }
}
